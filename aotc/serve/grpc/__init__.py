"""The Open Inference Protocol over gRPC: service, messages, wire format, streams, and limits of unread messages."""
