"""The runner over OpenVINO: weights as int8, keys and values in pages, one compiled graph for every step."""
