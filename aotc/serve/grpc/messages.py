"""The protocol's gRPC messages, transcribed from its published definition.

They are registered in a separate descriptor pool, so that another library in the process may define messages of the
same names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

# A message, followed by its fields: type, name, number. ``map`` is a map with string keys, ``one`` a member of a oneof,
# ``enum`` an enumeration.
_MESSAGES = """
ServerLiveRequest
ServerLiveResponse
  bool live 1
ServerReadyRequest
ServerReadyResponse
  bool ready 1
ModelReadyRequest
  string name 1
  string version 2
ModelReadyResponse
  bool ready 1
ServerMetadataRequest
ServerMetadataResponse
  string name 1
  string version 2
  repeated string extensions 3
ModelMetadataRequest
  string name 1
  string version 2
ModelMetadataResponse
  string name 1
  repeated string versions 2
  string platform 3
  repeated ModelMetadataResponse.TensorMetadata inputs 4
  repeated ModelMetadataResponse.TensorMetadata outputs 5
ModelMetadataResponse.TensorMetadata
  string name 1
  string datatype 2
  repeated int64 shape 3
InferParameter
  one bool bool_param 1
  one int64 int64_param 2
  one string string_param 3
  one double double_param 4
  one uint64 uint64_param 5
InferTensorContents
  repeated bool bool_contents 1
  repeated int32 int_contents 2
  repeated int64 int64_contents 3
  repeated uint32 uint_contents 4
  repeated uint64 uint64_contents 5
  repeated float fp32_contents 6
  repeated double fp64_contents 7
  repeated bytes bytes_contents 8
ModelInferRequest
  string model_name 1
  string model_version 2
  string id 3
  map InferParameter parameters 4
  repeated ModelInferRequest.InferInputTensor inputs 5
  repeated ModelInferRequest.InferRequestedOutputTensor outputs 6
  repeated bytes raw_input_contents 7
ModelInferRequest.InferInputTensor
  string name 1
  string datatype 2
  repeated int64 shape 3
  map InferParameter parameters 4
  InferTensorContents contents 5
ModelInferRequest.InferRequestedOutputTensor
  string name 1
  map InferParameter parameters 2
ModelInferResponse
  string model_name 1
  string model_version 2
  string id 3
  map InferParameter parameters 4
  repeated ModelInferResponse.InferOutputTensor outputs 5
  repeated bytes raw_output_contents 6
ModelInferResponse.InferOutputTensor
  string name 1
  string datatype 2
  repeated int64 shape 3
  map InferParameter parameters 4
  InferTensorContents contents 5
ModelRepositoryParameter
  one bool bool_param 1
  one int64 int64_param 2
  one string string_param 3
  one bytes bytes_param 4
ModelStreamInferResponse
  string error_message 1
  ModelInferResponse infer_response 2
RepositoryIndexRequest
  string repository_name 1
  bool ready 2
RepositoryIndexResponse
  repeated RepositoryIndexResponse.ModelIndex models 1
RepositoryIndexResponse.ModelIndex
  string name 1
  string version 2
  string state 3
  string reason 4
RepositoryModelLoadRequest
  string repository_name 1
  string model_name 2
  map ModelRepositoryParameter parameters 3
RepositoryModelLoadResponse
RepositoryModelUnloadRequest
  string repository_name 1
  string model_name 2
  map ModelRepositoryParameter parameters 3
RepositoryModelUnloadResponse
ModelConfigRequest
  string name 1
  string version 2
ModelConfigResponse
  ModelConfig config 1
ModelInput
  string name 1
  enum DataType data_type 2
  repeated int64 dims 4
ModelOutput
  string name 1
  enum DataType data_type 2
  repeated int64 dims 3
ModelDynamicBatching
  uint64 max_queue_delay_microseconds 2
ModelTransactionPolicy
  bool decoupled 1
ModelConfig
  string name 1
  string platform 2
  int32 max_batch_size 4
  repeated ModelInput input 5
  repeated ModelOutput output 6
  one ModelDynamicBatching dynamic_batching 11
  string backend 17
  ModelTransactionPolicy model_transaction_policy 19
StatisticDuration
  uint64 count 1
  uint64 ns 2
InferStatistics
  StatisticDuration success 1
  StatisticDuration fail 2
  StatisticDuration queue 3
  StatisticDuration compute_input 4
  StatisticDuration compute_infer 5
  StatisticDuration compute_output 6
  StatisticDuration cache_hit 7
  StatisticDuration cache_miss 8
InferBatchStatistics
  uint64 batch_size 1
  StatisticDuration compute_input 2
  StatisticDuration compute_infer 3
  StatisticDuration compute_output 4
ModelStatistics
  string name 1
  string version 2
  uint64 last_inference 3
  uint64 inference_count 4
  uint64 execution_count 5
  InferStatistics inference_stats 6
  repeated InferBatchStatistics batch_stats 7
ModelStatisticsRequest
  string name 1
  string version 2
ModelStatisticsResponse
  repeated ModelStatistics model_stats 1
"""

PARTIAL = ("ModelConfig", "ModelInput", "ModelOutput", "ModelDynamicBatching", "ModelStatistics")
"""Messages of Triton without the fields that are not supported here: clients read missing fields as defaults."""

_ENUMS = {
    "DataType": (
        "INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32",
        "FP64", "STRING", "BF16",
    ),
}  # fmt: skip

INFER, STREAM = "ModelInfer", "ModelStreamInfer"
HEALTH_METHODS = "ServerLive", "ServerReady"
METHODS = (
    "ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex",
    "RepositoryModelLoad", "RepositoryModelUnload",
)  # fmt: skip


def file_descriptor() -> Any:
    """Return the descriptor of a file with all messages."""
    file = descriptor_pb2.FileDescriptorProto(name="aotc/open_inference.proto", package=PACKAGE, syntax="proto3")
    for name, labels in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, label in enumerate(labels):
            enum.value.add(name=f"TYPE_{label}", number=number)
    made: dict[str, Any] = {}
    for name, fields in _message_definitions():
        outer, _, inner = name.rpartition(".")
        message = made[outer].nested_type.add() if outer else file.message_type.add()
        message.name, made[name] = inner, message
        for field in fields:
            _add_field(message, name, field.split())
    return file


def _message_definitions() -> Iterator[tuple[str, list[str]]]:
    """Yield each message with the lines of its fields."""
    lines = _MESSAGES.strip().splitlines()
    starts = [n for n, line in enumerate(lines) if not line.startswith(" ")]
    for start, end in zip(starts, [*starts[1:], len(lines)]):
        yield lines[start], lines[start + 1 : end]


def _add_field(message: Any, owner: str, words: list[str]) -> None:
    """Add a field to a message descriptor; ``words`` are modifier, type, name and number of its definition."""
    kinds = descriptor_pb2.FieldDescriptorProto
    form = words[0] if words[0] in ("repeated", "map", "one", "enum") else ""
    kind, name, number = words[bool(form) :]
    field = message.field.add(name=name, number=int(number), label=kinds.LABEL_OPTIONAL)
    if form in ("repeated", "map"):
        field.label = kinds.LABEL_REPEATED
    if form == "one":
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    if form == "map":
        entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
        entry.options.map_entry = True
        _add_field(entry, "", ["string", "key", "1"])
        _add_field(entry, "", [kind, "value", "2"])
        kind = f"{owner}.{entry.name}"
    if form == "enum":
        field.type, field.type_name = kinds.TYPE_ENUM, f".{PACKAGE}.{kind}"
    elif kind[0].isupper():
        field.type, field.type_name = kinds.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    else:
        field.type = getattr(kinds, f"TYPE_{kind.upper()}")


def _message_classes() -> dict[str, Any]:
    """Return the Python class of each message, by name."""
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file_descriptor())
    names = [name for name, _ in _message_definitions() if "." not in name]
    return {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{n}")) for n in names}


MESSAGE: dict[str, Any] = _message_classes()
"""Message classes by name."""
