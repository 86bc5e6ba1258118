"""The ONNX Runtime backend: every operation is an ONNX graph of standard operators, lowered from `kv` modules, on the caller's memory."""
