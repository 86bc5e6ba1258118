"""A whole model with one cache: kivi's, those of transformers, and llama.cpp's with its own weights and code.

All but llama.cpp run SmolLM2-135M in float32 through transformers' `generate()`; llama.cpp reads the 4-bit weights of the file that the
others were converted from, so its figures are of another computation, end to end.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kivi.bench import peers
from kivi.bench.plan import Plan
from kivi.bench.result import ran
from kivi.errors import InputError, IntegrationError
from kivi.spec import CacheSpec

SPARE = 64  # tokens of llama.cpp's context that stay free
LLAMA = {"llama.cpp f16": "GGML_TYPE_F16", "llama.cpp q8_0": "GGML_TYPE_Q8_0"}


class Decoder(ABC):
    """A contender. `ids` holds the text so far, int64 [1, T]; the last of its tokens is not in the cache yet."""

    weights = "float32"

    def __init__(self, name: str, ids: Any) -> None:
        self.name, self.ids = name, ids

    def take_turn(self) -> None:
        """Called before `decode`, and not timed: another contender may have used the model."""
        return

    @abstractmethod
    def prefill(self, chunk: int) -> None:
        """Read all of `ids` but the last token, `chunk` tokens at a time."""

    @abstractmethod
    def decode(self, new: int) -> None:
        """Append `new` tokens, greedily: as many passes of one token each."""

    def cache_bytes(self) -> int | None:
        """Bytes that the cache holds; None where it does not say."""
        return None

    def ran(self) -> dict[str, Any] | None:
        """What kivi says that ran; None for others."""
        return None


class Transformers(Decoder):
    """A model of transformers with a cache of one kind."""

    def __init__(self, name: str, ids: Any, model: Any, cache: Any, attention: str) -> None:
        super().__init__(name, ids)
        self.model, self.cache, self.attention = model, cache, attention

    def take_turn(self) -> None:
        self.model.set_attn_implementation(self.attention)

    @torch.no_grad()
    def prefill(self, chunk: int) -> None:
        for start in range(0, self.ids.shape[1] - 1, chunk):
            part = self.ids[:, start : min(start + chunk, self.ids.shape[1] - 1)]
            self.model(part, cache=self.cache, use_cache=True, logits_to_keep=1)

    def decode(self, new: int) -> None:
        mask = torch.ones_like(self.ids)
        self.ids = self.model.generate(
            self.ids, attention_mask=mask, cache=self.cache, max_new_tokens=new, min_new_tokens=new, do_sample=False
        )

    def cache_bytes(self) -> int | None:
        if hasattr(self.cache, "nbytes"):
            return int(self.cache.nbytes)
        if self.name == "DynamicCache":
            return sum(t.numel() * t.element_size() for layer in self.cache.layers for t in (layer.keys, layer.values))
        return None

    def ran(self) -> dict[str, Any] | None:
        return ran(next(iter(self.cache.kv.values()))) if hasattr(self.cache, "kv") else None


class Llama(Decoder):
    """llama.cpp in this process, through xllamacpp. Each call of `decode` starts from the prompt, which it has in its cache."""

    weights = "Q4_1"

    def __init__(self, name: str, ids: Any, context: int, threads: int) -> None:
        super().__init__(name, ids)
        import xllamacpp  # type: ignore[import-untyped, import-not-found]

        from kivi.demo import model

        package: Any = xllamacpp
        options = package.CommonParams()
        options.model.path = str(model.gguf_path())
        options.n_ctx, options.n_parallel, options.cache_ram_mib, options.ui = context, 1, 0, False
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
        options.verbosity = -1
        options.cache_type_k = options.cache_type_v = getattr(package.ggml_type, LLAMA[name])
        self.prompt = ids[0].tolist()
        self.server = package.Server(options)

    def prefill(self, chunk: int) -> None:
        self._complete(self.prompt[:-1], 1)

    def decode(self, new: int) -> None:
        self._complete(self.prompt, new)

    def _complete(self, prompt: list[int], new: int) -> None:
        asked = {"prompt": prompt, "n_predict": new, "temperature": 0, "cache_prompt": True, "ignore_eos": True}
        answer = self.server.handle_completions(asked)
        answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
        made = answer.get("timings", {}).get("predicted_n")
        if made != new:
            raise IntegrationError(f"llama.cpp made {made} of {new} tokens: {answer.get('error', answer)}")


def contenders(plan: Plan, model: Any, ids: Any, room: int, threads: int) -> dict[str, Callable[[], Decoder]]:
    """Name -> how to make the decoder, kivi's first. room: tokens in all, the new ones too."""
    from kivi.integrations.transformers import KiviCache, register

    register()

    def own(spec: CacheSpec) -> Decoder:
        return Transformers(spec.name, ids, model, KiviCache(spec, model.config, backend=plan.backend.name, mode=plan.backend.mode), "kivi")

    out: dict[str, Callable[[], Decoder]] = {spec.name: partial(own, spec) for spec in plan.specs}
    for name, make in peers.caches(model.config).items():
        out[name] = partial(_of_transformers, name, ids, model, make)
    for name in LLAMA:
        out[name] = partial(Llama, name, ids, room + SPARE, threads)
    return out


def _of_transformers(name: str, ids: Any, model: Any, make: Callable[[], Any]) -> Decoder:
    return Transformers(name, ids, model, make(), "sdpa")


def names(plan: Plan) -> list[str]:
    """The contenders, without loading anything."""
    return [*(spec.name for spec in plan.specs), "DynamicCache", *(peers.quantized_name(p) for p in peers.QUANTIZED), *LLAMA]


def why_left_out(name: str, plan: Plan) -> str:
    """Why a contender does not run; empty if it does."""
    if plan.models and name not in plan.models:
        return "it was not asked for"
    return "" if name in {spec.name for spec in plan.specs} else peers.why_missing(peers.package_of(name))


def checked(plan: Plan) -> None:
    """Raises `InputError` if `plan.models` names a contender that there is not."""
    unknown = [name for name in plan.models if name not in names(plan)]
    if unknown:
        raise InputError(f"no contender is called {unknown[0]!r}; there are {', '.join(names(plan))}")


def prompt(tokenizer: Any, context: int) -> Any:
    """`context` tokens of a book and the one after them, int64 [1, context + 1]."""
    from kivi.demo import text

    return text.alice_ids(tokenizer, 256, context + 1)
