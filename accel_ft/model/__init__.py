"""The model: loading, adapters, faster layers, optimizer, memory needs, ONNX export."""
