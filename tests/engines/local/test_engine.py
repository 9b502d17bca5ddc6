"""The embedded engine with its real model: what the contract does not say."""

import asyncio

import numpy as np

from dragoman.engines.local import LocalEngine


def test_card(local_engine: LocalEngine) -> None:
    card = local_engine.card
    assert card.name == "SmolLM2-135M-Instruct.Q4_1"
    assert card.max_model_len == 256
    assert "<|im_start|>" in card.templates["default"]
    assert card.details["architecture"] == "llama"


def test_what_means_the_same_has_near_vectors(local_engine: LocalEngine) -> None:
    encode = local_engine.tokenizer.encode
    texts = ["The cat sat on the mat.", "A cat was sitting on a mat.", "Interest rates rose again in March."]
    vectors = np.array(asyncio.run(local_engine.embed([encode(text) for text in texts])))
    near, far = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert near > far
