"""A server under hostile load over gRPC, as a process: clients of gRPC may do no more than those of HTTP."""

import contextlib
import gzip
import itertools
import json
import socket
import threading
import time

import numpy as np
import pytest
from support.hostile import assert_no_stall, hostile_server
from support.served import until

grpc = pytest.importorskip("grpc")
pytest.importorskip("tritonclient.grpc")

from tritonclient.grpc import service_pb2, service_pb2_grpc  # noqa: E402

pytestmark = pytest.mark.cpu

MIB = 1 << 20
OPTIONS = (
    "--max-message-mb=24", "--max-body-mb=24", "--max-json-mb=8", "--memory-mb=64", "--queue=40", "--head-timeout=1",
    "--body-timeout=1", "--idle-timeout=1",
)  # fmt: skip
SERVICE = "/inference.GRPCInferenceService"


@pytest.fixture(scope="module")
def server(hostile_models, tmp_path_factory):
    """A server with tight limits."""
    with hostile_server(hostile_models, tmp_path_factory.mktemp("log"), *OPTIONS) as found:
        yield found


@pytest.fixture
def channel(server):
    """A connection of its own."""
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options) as found:
        yield found


@pytest.fixture
def stub(channel):
    """Sends messages."""
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


def message(name="", **more):
    made = service_pb2.ModelInferRequest(model_name="tiny", id=name, **more)
    for key in "xy":
        made.inputs.add(name=key, shape=[4], datatype="FP32").contents.fp32_contents.extend([1, 2, 3, 4])
    return made


def vector(server, x, raw=True, model="double"):
    made = service_pb2.ModelInferRequest(model_name=model)
    row = made.inputs.add(name=server.x, shape=[x.size], datatype="FP32")
    if raw:
        made.raw_input_contents.append(x.tobytes())
    else:
        row.contents.fp32_contents.extend(x)
    return made


def good(stub):
    return list(stub.ModelInfer(message()).outputs[0].contents.fp32_contents) == [2, 4, 6, 8]


def unfinished(channel, path, count):
    """So many calls whose message never comes."""
    ended = threading.Event()

    def nothing():
        ended.wait(60)
        yield from ()

    calls = [channel.stream_unary(path).future(nothing()) for _ in range(count)]
    return ended, calls


def code_of(call):
    with pytest.raises(grpc.RpcError) as failed:
        call.result(20)
    return failed.value.code().name


def test_an_undecodable_message_does_not_end_a_stream(channel, stub):
    """Its answer comes in the order of the requests; alone it is an error of its own."""
    parts = [message("1").SerializeToString(), b"\xff\xff\xff", b"\x0a\xff", message("2").SerializeToString()]
    stream = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")
    answers = [service_pb2.ModelStreamInferResponse.FromString(data) for data in stream(iter(parts))]
    assert [answer.infer_response.id for answer in answers] == ["1", "", "", "2"]
    assert ["cannot be decoded" in answer.error_message for answer in answers] == [False, True, True, False]
    assert all(answer.infer_response.parameters["triton_final_response"].bool_param for answer in answers)
    for path in ("ModelInfer", "ModelMetadata", "RepositoryIndex"):
        with pytest.raises(grpc.RpcError, match="cannot be decoded"):
            channel.unary_unary(f"{SERVICE}/{path}")(b"\xff\xff")
    assert good(stub)


def test_a_call_without_a_message_times_out(channel, stub):
    held = [unfinished(channel, f"{SERVICE}/{path}", 1) for path in ("ModelInfer", "ModelMetadata", "ServerLive")]
    began = time.monotonic()
    assert [code_of(call) for _, (call,) in held] == ["DEADLINE_EXCEEDED"] * 3
    assert time.monotonic() - began < 5
    for ended, _ in held:
        ended.set()
    assert good(stub)


def test_health_responds_while_all_calls_and_streams_are_in_use(server, channel, stub):
    """More calls and streams than there may be, and more questions of health that never end."""
    health = channel.unary_unary("/grpc.health.v1.Health/Check")
    held = [
        unfinished(channel, path, count)
        for path, count in (
            (f"{SERVICE}/ModelInfer", 150), (f"{SERVICE}/ModelStreamInfer", 50), ("/grpc.health.v1.Health/Check", 100),
        )
    ]  # fmt: skip
    try:
        assert until(lambda: any(call.done() for call in held[0][1]))
        for _ in range(20):
            assert health(b"", timeout=5) == b"\x08\x01"
            assert stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=5).live
        assert server.json("/v2/health/live")[0] == 200
    finally:
        for ended, _ in held:
            ended.set()
        for _, calls in held:
            for call in calls:
                call.cancel()
    assert until(lambda: server.figure("aotc_in_flight") == 0)
    assert good(stub)


@pytest.mark.parametrize("raw", [True, False])
def test_large_messages_do_not_stall_the_server(server, stub, raw):
    """As bytes, and as numbers: these are read and written by another process."""
    x = np.arange(4 * MIB if raw else MIB, dtype="f4")
    request, found = vector(server, x, raw), []
    assert_no_stall(server, lambda: found.append(stub.ModelInfer(request)))
    answer = found[-1]
    data = answer.raw_output_contents[0] if raw else np.array(answer.outputs[0].contents.fp32_contents, "f4")
    np.testing.assert_array_equal(np.frombuffer(data, "f4"), x * 2)
    stream = list(stub.ModelStreamInfer(iter([request, message("b")])))
    assert [row.infer_response.id for row in stream] == ["", "b"]
    assert stream[0].infer_response.outputs == answer.outputs


def test_numbers_beyond_the_limit_are_refused(server, stub):
    with pytest.raises(grpc.RpcError, match="--max-json-mb"):
        stub.ModelInfer(vector(server, np.ones(3 * MIB, "f4"), raw=False))


@pytest.mark.parametrize("field", [b"\x2a\x00", b"\x32\x00", b"\x3a\x00", b"\x22\x00"])
def test_millions_of_empty_fields_do_not_stall_the_server(server, channel, stub, field):
    """Two bytes each: inputs, outputs, raw inputs, parameters."""
    data = message().SerializeToString() + field * (6 * MIB)
    call = channel.unary_unary(f"{SERVICE}/ModelInfer")

    def attack():
        with pytest.raises(grpc.RpcError) as failed:
            call(data)
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    before = server.memory()
    assert_no_stall(server, attack)
    assert server.memory() - before < 200 * MIB
    assert good(stub)


def test_requests_of_all_protocols_share_a_memory_limit(server, stub):
    """Answers that nobody has read are of it too; what does not fit is refused, a small request is not."""
    x = np.ones(5 * MIB, "f4")
    calls = [stub.ModelInfer.future(vector(server, x)) for _ in range(16)]
    codes = set()
    for call in calls:
        try:
            call.result(60)
            codes.add("OK")
        except grpc.RpcError as error:
            codes.add(error.code().name)
    assert codes <= {"OK", "UNAVAILABLE"}
    assert "OK" in codes
    assert until(lambda: server.figure("aotc_request_bytes") == 0)
    assert good(stub)


def test_an_endless_model_does_not_starve_others(server, stub):
    endless = service_pb2.ModelInferRequest(model_name="spin")
    endless.inputs.add(name=server.n, shape=[], datatype="INT32").contents.int_contents.append(1 << 30)
    calls = [stub.ModelInfer.future(endless, timeout=20) for _ in range(12)]
    try:
        assert until(lambda: server.figure("aotc_in_flight") == 12)
        began = time.monotonic()
        for _ in range(10):
            assert good(stub)
        assert time.monotonic() - began < 3
    finally:
        for call in calls:
            call.cancel()
    assert until(lambda: server.figure("aotc_in_flight") == 0)


@pytest.mark.parametrize("rounds", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_failed_requests_free_their_memory(server, stub, rounds):
    """Errors refer to what their requests had in memory, and are let go; they held 100 MB a round."""
    refused = vector(server, np.ones(4 * MIB, "f4"), model="tiny")
    body = json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}).encode()
    memory = []
    for _ in range(rounds):
        for _ in range(6):
            with pytest.raises(grpc.RpcError):
                stub.ModelInfer(refused)
            head = {"Inference-Header-Content-Length": len(body)}
            assert server.ask("/v2/models/tiny/infer", body + bytes(16 * MIB), head)[0] == 400
        memory.append(server.memory())
    assert memory[-1] - memory[0] < 100 * MIB


class SilentClient:
    """A client that sends requests and reads nothing: HTTP/2 by hand, with a window that is never opened.

    Frames are those of RFC 9113: length, type, flags, stream; headers are literals without an index (RFC 7541).
    """

    def __init__(self, port, path):
        self.socket = socket.create_connection(("127.0.0.1", port), 20)
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + self._frame(4, 0, 0, b""))
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost", "te": "trailers"}
        self._head = self._fields({**fields, "content-type": "application/grpc"})
        self._streams = itertools.count(1, 2)

    @staticmethod
    def _fields(fields):
        return b"".join(
            b"\x00" + bytes((len(key),)) + key.encode() + bytes((len(value),)) + value.encode()
            for key, value in fields.items()
        )

    @staticmethod
    def _frame(kind, flags, stream, payload):
        return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload

    def send(self, data, encoding="", announced=None):
        """Send a call with one message of at most 64 KiB; one that is ``announced`` as longer does not end."""
        more = self._fields({"grpc-encoding": encoding}) if encoding else b""
        self.send_with(more, data, encoding, announced)

    def send_with(self, more, data, encoding="", announced=None):
        """Send a call with more fields of metadata, as they are encoded."""
        stream, size = next(self._streams), len(data) if announced is None else announced
        body = bytes((bool(encoding),)) + size.to_bytes(4, "big") + data
        parts = [body[at : at + 16_384] for at in range(0, len(body), 16_384)]
        frames = [self._frame(0, announced is None and part is parts[-1], stream, part) for part in parts]
        self.socket.sendall(self._frame(1, 4, stream, self._head + more) + b"".join(frames))


@pytest.mark.parametrize("path", ["ModelInfer", pytest.param("ModelStreamInfer", marks=pytest.mark.slow)])
def test_clients_that_never_read_are_disconnected(server, stub, path):
    """Small requests for large answers."""
    made = service_pb2.ModelInferRequest(model_name="tiny.upto", raw_input_contents=[np.int64(MIB // 4).tobytes()])
    made.inputs.add(name="n", shape=[], datatype="INT64")
    before = server.memory()
    clients = [SilentClient(server.grpc_port, f"{SERVICE}/{path}") for _ in range(6)]
    for client in clients:
        client.send(made.SerializeToString())
    assert until(lambda: server.figure("aotc_request_bytes") > 0)
    assert server.memory() - before < 250 * MIB
    assert until(lambda: server.figure("aotc_request_bytes") == 0)
    assert until(lambda: server.memory() - before < 120 * MIB)
    assert good(stub)
    for client in clients:
        client.socket.close()


def test_the_length_limit_applies_to_decompressed_messages(server, stub):
    """30 MiB in 30 kB: the library stops at the limit. The log has no traceback, whoever ends the call first."""
    data = gzip.compress(message(raw_input_contents=[bytes(30 * MIB)]).SerializeToString())
    before, client = server.memory(), SilentClient(server.grpc_port, f"{SERVICE}/ModelInfer")
    for _ in range(2):
        client.send(data, "gzip")
        time.sleep(0.1)
    client.socket.settimeout(20)
    text = b""
    while b"larger than max" not in text:
        part = client.socket.recv(1 << 16)
        assert part, text
        text += part
    client.socket.close()
    assert server.memory() - before < 100 * MIB
    assert good(stub)


class HalfSender(SilentClient):
    """A client that sends a part of a message, within the windows that the server opens, and waits."""

    def send_part(self, count, announced):
        """Send ``count`` bytes of a message, until the connection ends."""
        with contextlib.suppress(OSError):
            self.send(b"", announced=announced)
            windows = {0: 65_535 - 5, 1: 65_535 - 5}  # of the connection and of the stream
            initial = 65_535
            while True:
                size = min(*windows.values(), count, 16_384)
                if size > 0:
                    self.socket.sendall(self._frame(0, 0, 1, bytes(size)))
                    windows, count = {k: v - size for k, v in windows.items()}, count - size
                    continue
                kind, flags, stream, payload = self._read()
                if kind == 8 and stream in windows:
                    windows[stream] += int.from_bytes(payload, "big")
                elif kind == 4 and not flags & 1:
                    for at in range(0, len(payload), 6):
                        if payload[at : at + 2] == b"\x00\x04":
                            size = int.from_bytes(payload[at + 2 : at + 6], "big")
                            windows[1], initial = windows[1] + size - initial, size
                    self.socket.sendall(self._frame(4, 1, 0, b""))
                elif kind == 6 and not flags & 1:
                    self.socket.sendall(self._frame(6, 1, 0, payload))

    def _read(self):
        head = self._exactly(9)
        return head[3], head[4], int.from_bytes(head[5:], "big"), self._exactly(int.from_bytes(head[:3], "big"))

    def _exactly(self, count):
        data = b""
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            if not part:
                raise OSError
            data += part
        return data

    def close(self):
        """End the connection, also for a thread that reads it."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


@pytest.mark.parametrize("path", ["ModelInfer", "ModelStreamInfer", "ModelMetadata"])
def test_half_sent_messages_share_a_memory_limit(server, channel, stub, path):
    """Each client announces 24 MiB and sends 16: 39 of them would take 624 MiB. Some are ended, others are answered."""
    before, most = server.memory(), []
    clients = [HalfSender(server.grpc_port, f"{SERVICE}/{path}") for _ in range(39)]
    threads = [threading.Thread(target=client.send_part, args=(16 * MIB, 24 * MIB)) for client in clients]
    try:
        for thread in threads:
            thread.start()
        end = time.monotonic() + 4
        while time.monotonic() < end:
            most.append(server.memory() - before)
            assert server.json("/v2/health/live")[0] == 200
            assert stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=20).live
    finally:
        for client in clients:
            client.close()
        for thread in threads:
            thread.join()
    assert max(most) < 350 * MIB
    assert until(lambda: server.memory() - before < 200 * MIB)
    assert good(stub)


@pytest.mark.parametrize("field", [("x", "\xe4"), ("authorization", "\xff"), ("grpc-timeout", "-1S"), ("x-bin", "!")])
def test_metadata_that_is_not_text_leaves_no_traceback(server, stub, field):
    client = SilentClient(server.grpc_port, f"{SERVICE}/ModelInfer")
    name, value = field[0].encode(), field[1].encode("latin-1")
    client.send_with(b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value, message().SerializeToString())
    client.socket.settimeout(1)
    with contextlib.suppress(TimeoutError, ConnectionError):
        while client.socket.recv(1 << 16):
            pass
    client.socket.close()
    assert "Traceback" not in server.log()
    assert good(stub)
