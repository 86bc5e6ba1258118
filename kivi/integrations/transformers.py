"""A kivi cache for Hugging Face transformers: keys and values of a model's full-attention layers, stored packed.

    from kivi.integrations.transformers import KiviCache, register

    register()
    model.set_attn_implementation("kivi")
    cache = KiviCache("kivi-2bit", model.config)
    model.generate(**inputs, cache=cache)           # or past_key_values=cache, before transformers 5.24

The choice made here: a cache layer's `update` does not return the history as tensors, because to rebuild it every step is
what makes a quantized cache slow and large. It returns the new tokens and the layer they belong to; these go straight to the
attention function `kivi`, which appends and attends in one call (`kivi.KVCache.attend`). So cache and attention belong
together, and a model that runs another attention is told so.

One `KiviCache` holds one batch. To continue the same sequences, pass it again; for others make a new one or `reset()` it. Stale
reuse raises where it shows: in the batch size, the padding, the positions, or a prompt not longer than what is stored. A cache
never sees token ids, and `generate()` cuts the stored length off the prompt; so a longer prompt counts as a continuation.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import MutableMapping
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import kivi
from kivi.candidates import matches
from kivi.dtypes import FLOATS
from kivi.errors import IntegrationError
from kivi.geometry import geometry
from kivi.integrations.layer_plan import LayerPlan, plan_layers
from kivi.integrations.left_padding import LeftPadding
from kivi.selection import check_servable, resolve

NAME = "kivi"
logger = logging.getLogger("kivi")


def register() -> None:
    """Make `model.set_attn_implementation("kivi")` known to transformers: the attention function and its mask. Idempotent."""
    AttentionInterface.register(NAME, kivi_attention)
    AttentionMaskInterface.register(NAME, kivi_mask)


class KiviCache(Cache):
    """A transformers cache whose full-attention layers hold one `kivi.KVCache` each.

    spec: preset name, path or `CacheSpec`. config: the model's configuration. backend, mode, device, max_tokens: as for
    `kivi.KVCache`. Batch, dtype and softmax scale come with the first tokens. `layer_plan` says where each layer is stored and
    why; layers that stay in full precision are also logged once, to the logger "kivi".

    Raises `IntegrationError` for a model that kivi cannot serve, and what `kivi.select` or `kivi.get_backend` raise.
    """

    layer_plan: tuple[LayerPlan, ...]

    def __init__(
        self, spec: Any, config: Any, backend: Any = "auto", mode: str | None = None, device: Any = "auto", max_tokens: int | None = None
    ) -> None:
        self.spec = kivi.load_spec(spec)
        plan, layers = plan_layers(config)
        self.layer_plan = tuple(plan)
        options = {"backend": backend, "mode": mode, "device": device, "max_tokens": max_tokens}
        chosen: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()  # backends by shape; no copy of the cache copies them
        if any(item.store == "kivi" for item in plan):
            _check_backend(self.spec, config.get_text_config(decoder=True), options)
        self.padding = LeftPadding()
        for item in plan:
            if item.store == "kivi":
                layers[item.layer] = KiviLayer(self.spec, item.layer, self.padding, options, chosen)
        super().__init__(layers=layers)
        _say_full_precision(config, plan)

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Called by the model. Full-precision layers return tensors, kivi layers a pair for the attention function `kivi`."""
        if layer_idx == 0:
            self._check_whole()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def kv(self) -> dict[int, Any]:
        """The `kivi.KVCache` of each layer that has one, by layer number; empty before the first tokens."""
        return {layer.index: layer.kv for layer in self.layers if isinstance(layer, KiviLayer) and layer.kv is not None}

    @property
    def ran(self) -> dict[int, Any]:
        """What ran, by layer number: backend, mode, device, kernel, layout."""
        return {index: cache.ran for index, cache in self.kv.items()}

    def to(self, backend: Any, mode: str | None = None, device: Any = "auto") -> KiviCache:
        """Move every kivi layer to another backend, and serve later sequences there. All layers or none. Returns self."""
        moved, target = [], (backend, mode, device)
        try:
            for cache in self.kv.values():
                before = cache.backend
                cache.to(*target)
                moved.append((cache, before))
                target = (cache.backend, None, "auto")  # one for all
        except BaseException:
            for cache, before in moved:
                cache.to(before)
            raise
        for layer in self.layers:
            if isinstance(layer, KiviLayer):
                layer.options |= {"backend": backend, "mode": mode, "device": device}
        return self

    @property
    def nbytes(self) -> int:
        """Bytes that the cache holds: every kivi page, table and window, and the full-precision layers."""
        return sum(cache.nbytes for cache in self.kv.values()) + self._full_precision_bytes()

    def memory(self) -> dict[str, Any]:
        """`kivi.KVCache.memory()` summed over layers, and `full_precision_layers`: bytes of the layers that are not quantized."""
        total: dict[str, Any] = {"measured": 0, "formula": 0, "full_precision": 0, "pool": 0, "clamped": 0}
        total |= {"padding": Counter(), "by_kind": Counter()}
        for cache in self.kv.values():
            report = cache.memory()
            for key in ("measured", "formula", "full_precision", "pool", "clamped"):
                total[key] += report[key]
            for key in ("padding", "by_kind"):
                total[key].update(report[key])
        total |= {"padding": dict(total["padding"]), "by_kind": dict(total["by_kind"])}
        return {**total, "full_precision_layers": self._full_precision_bytes()}

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens: 0 or a negative number, as transformers counts them."""
        if tokens_to_remove > 0:
            raise IntegrationError(f"crop({tokens_to_remove}): pass a negative number, the tokens to remove from the end")
        if -tokens_to_remove > self.get_seq_length():
            raise IntegrationError(f"crop({tokens_to_remove}): the cache holds only {self.get_seq_length()} tokens")
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, DynamicSlidingWindowLayer):
                continue
            window = layer.sliding_window
            if not getattr(layer, "record_past", False) and layer.get_seq_length() >= window:
                raise IntegrationError(
                    f"crop({tokens_to_remove}): layer {index} attends to a window of {window} tokens, which is full, and has dropped those "
                    f"before it, so it cannot go back; call activate_past_recording() before the tokens that may be cropped"
                )
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Request `i` becomes a copy of request `beam_idx[i]`. Table edits; no code is written."""
        super().reorder_cache(beam_idx)
        self.padding.take(_rows(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each request `repeats` times, copies next to each other."""
        super().batch_repeat_interleave(repeats)
        self.padding.take(np.repeat(np.arange(len(self.padding.padding)), repeats))

    def batch_select_indices(self, indices: Any) -> None:
        """Keep these requests only, in this order."""
        super().batch_select_indices(indices)
        self.padding.take(_rows(indices))

    def reset(self) -> None:
        """Forget all tokens. Another batch size may follow."""
        super().reset()
        self.padding.clear()

    def _check_whole(self) -> None:
        lengths = [layer.get_seq_length() if isinstance(layer, CacheLayerMixin) else None for layer in self.layers]
        known = {length for length in lengths if length is not None}
        if len(known) > 1:
            raise IntegrationError(
                f"layers hold different numbers of tokens ({', '.join(map(str, sorted(known)))}): an earlier forward pass failed at layer "
                f"{lengths.index(min(known))}, after the layers before it had stored its tokens; reset() the cache or make a new one"
            )

    def _full_precision_bytes(self) -> int:
        own: list[Any] = [layer for layer in self.layers if not isinstance(layer, KiviLayer)]
        return sum(t.numel() * t.element_size() for layer in own for t in (layer.keys, layer.values) if t is not None)


class KiviLayer(CacheLayerMixin):
    """One layer of a `KiviCache`. Its `kivi.KVCache` is made when the first tokens arrive and tell batch, dtype and heads."""

    is_sliding = False
    is_croppable = True  # exactly so while `record_past` is set: what is cropped then was never sealed
    supports_early_init = False
    kv: Any

    def __init__(
        self, spec: Any, index: int, padding: LeftPadding, options: dict[str, Any], chosen: MutableMapping[tuple[Any, ...], Any]
    ) -> None:
        super().__init__()
        self.spec, self.index, self.padding, self.options, self._chosen = spec, index, padding, options, chosen
        self.kv = None
        self._shape: dict[str, Any] = {}
        self.width = 0  # slots seen, padding included: what transformers calls the sequence length
        self.record_past = False  # transformers' word for: tokens stay pending until crop() says how many to keep
        self._cropped: bool | None = None

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The new tokens, for the attention function. Nothing is stored yet, so a refused call leaves the cache as it was."""
        new = NewTokens(self, key_states.detach(), value_states.detach())
        return new, new

    def attend(self, query: Any, new: NewTokens, mask: Any, scale: float | None, positions: Any) -> Any:
        """Append `new` and attend: query [B, Hq, n, D] -> [B, Hq, n, Dv]. Rows that `mask` hides as padding come back as zeros."""
        batch, _, n, _ = query.shape
        if new.width != self.width:
            raise IntegrationError(f"layer {self.index} attends twice to the same new tokens; kivi stores and reads them in one call")
        chunk = self.padding.chunk(mask, positions, batch, self.width, n)
        self._ready(query, new, scale)
        if self.record_past and self._cropped is False:  # a forward pass that no crop followed: drafting is over
            self.record_past, self._cropped = False, None
        if not self.record_past:
            self._settle()
        q, k, v = (chunk.to_front(x) for x in (query.detach(), new.key, new.value))
        out = self.kv.attend(q, k, v, counts=chunk.counts, commit=not self.record_past)
        self.width += n
        self._cropped = False if self._cropped else self._cropped
        return chunk.to_back(out)

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Nothing: the number of query heads comes with the first attention call."""

    def get_seq_length(self) -> int:
        return self.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.width + query_length, 0

    def get_max_length(self) -> int:
        return self.options["max_tokens"] or -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def activate_past_recording(self) -> None:
        """Assisted decoding: from now on new tokens stay pending, floating and unsealed, until `crop`."""
        self.record_past, self._cropped = True, None

    def crop(self, tokens_to_remove: int) -> None:
        if self.kv is None:
            return
        width = self.width + tokens_to_remove
        keep = self.padding.tokens(width)
        committed = np.array([self.kv.lengths(b)["tokens"] for b in range(len(keep))])
        pending = np.array([self.kv.pending(b) for b in range(len(keep))])
        if pending.any():
            self.kv.commit(np.clip(keep - committed, 0, pending).tolist())
        if (keep < committed).any():
            self.kv.crop(np.minimum(keep, committed + pending).tolist())
        self.width, self._cropped = width, True

    def reorder_cache(self, beam_idx: Any) -> None:
        if self.kv is not None:
            self.kv.reorder(_rows(beam_idx).tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.kv is not None:
            self.kv.repeat(repeats)

    def batch_select_indices(self, indices: Any) -> None:
        if self.kv is not None:
            self.kv.select(_rows(indices).tolist())

    def reset(self) -> None:
        if self.kv is not None:
            self.kv.reset()
        self.width, self.record_past, self._cropped = 0, False, None

    def _settle(self) -> None:
        if any(self.kv.pending(b) for b in range(self.kv.batch)):
            self.kv.commit()

    def _ready(self, query: Any, new: NewTokens, scale: float | None) -> None:
        """Make the cache for the first tokens, or check that these are of the same kind."""
        batch, q_heads, _, head_dim = query.shape
        shape = {"q_heads": q_heads, "kv_heads": new.key.shape[1], "head_dim": head_dim, "value_head_dim": new.value.shape[-1]}
        shape |= {"dtype": str(new.key.dtype).removeprefix("torch."), "scale": scale}
        if self.kv is None or (self.width == 0 and (batch, shape) != (self.kv.batch, self._shape)):
            options = dict(self.options)
            if isinstance(options["backend"], str) and matches(str(query.device), str(options["device"])):
                options["device"] = str(query.device)  # where this layer runs, not where a backend would like to
            named = (batch, *shape.values(), *(str(options[name]) for name in ("backend", "mode", "device")))
            if isinstance(options["backend"], str) and named in self._chosen:  # layers that are alike share one backend, and its memory
                options |= {"backend": self._chosen[named], "mode": None, "device": "auto"}
            self.kv, self._shape, self.is_initialized = kivi.KVCache(self.spec, batch=batch, **shape, **options), shape, True
            self._chosen[named] = self.kv.backend
        elif shape != self._shape:
            wrong = ", ".join(f"{k} was {self._shape[k]} and is now {v}" for k, v in shape.items() if v != self._shape[k])
            raise IntegrationError(f"layer {self.index}: {wrong}; a cache serves one model, so make a new KiviCache for another")


class NewTokens:
    """What `KiviLayer.update` returns: the new keys and values, on their way to the attention function `kivi`.

    It is not a tensor. A model that uses it as one runs another attention, and any such use raises `IntegrationError`.
    """

    __slots__ = ("key", "layer", "value", "width")

    def __init__(self, layer: KiviLayer, key: Any, value: Any) -> None:
        self.layer, self.key, self.value, self.width = layer, key, value, layer.width

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _not_a_tensor(f"read .{name} of the keys and values of layer {self.layer.index}")

    def __getitem__(self, index: Any) -> Any:
        raise _not_a_tensor(f"indexed the keys and values of layer {self.layer.index}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _not_a_tensor(f"called torch's {getattr(function, '__name__', function)} on keys and values")


def _not_a_tensor(act: str) -> IntegrationError:
    return IntegrationError(
        f"the model {act} as if they were tensors, so its attention is not {NAME!r}; "
        f"call kivi.integrations.transformers.register() and model.set_attn_implementation({NAME!r}) before the forward pass "
        "(a model with an attention of its own, outside transformers' AttentionInterface, cannot use a KiviCache)"
    )


class _Inference(torch.autograd.Function):
    """Attention without a gradient: the forward pass works outside `no_grad`, and a backward pass says why it cannot."""

    @staticmethod
    def forward(context: Any, query: Any, new: NewTokens, mask: Any, scale: float | None, positions: Any) -> Any:
        return new.layer.attend(query, new, mask, scale, positions)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        raise IntegrationError("a quantized cache has no gradient; train with use_cache=False, or run the model under torch.no_grad()")


def kivi_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, dropout: float = 0.0, **kwargs: Any
) -> tuple[Any, None]:
    """The attention function `kivi` of transformers' `AttentionInterface`.

    query [B, Hq, n, D] -> ([B, n, Hq, Dv], None). `key` and `value` come from a `KiviCache`, or are plain tensors (another
    cache, none, or a layer in full precision): these go to transformers' sdpa. Raises `IntegrationError` for what kivi does
    not serve, naming it.
    """
    _refuse(kwargs, softcap="a cap on attention scores (softcap)", s_aux="learned attention sinks (s_aux)")
    if not isinstance(key, NewTokens):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    _refuse(
        kwargs,
        position_bias="a position bias on attention scores (position_bias)",
        sliding_window="a sliding window on a layer that the configuration calls full attention",
        output_attentions="attention weights as output (output_attentions)",
    )
    if dropout:
        raise IntegrationError(f"dropout = {dropout} on attention weights is a training option; call model.eval() before using a KiviCache")
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise IntegrationError("this layer attends in both directions (is_causal = False); kivi serves causal attention only")
    out = _Inference.apply(_autocast(query, key), key, attention_mask, scaling, kwargs.get("position_ids"))
    return out.transpose(1, 2).contiguous(), None


def _autocast(query: Any, new: NewTokens) -> Any:
    """The query, and with it the new keys and values, in the dtype of an autocast region that is open, as sdpa casts them."""
    if not torch.is_autocast_enabled(query.device.type):
        return query
    dtype = torch.get_autocast_dtype(query.device.type)
    new.key, new.value = new.key.to(dtype), new.value.to(dtype)
    return query.to(dtype)


def kivi_mask(*args: Any, q_length: int, **kwargs: Any) -> Any:
    """The mask function `kivi` of transformers' `AttentionMaskInterface`: sdpa's boolean mask, or None for plain causal attention.

    Layers in full precision need it as it is; for a kivi layer the attention function reads the left padding from it.
    """
    if q_length == 0:  # generate() cuts the prompt by what the cache holds; nothing is left of one that is not longer
        raise IntegrationError(
            "no new tokens: the prompt is not longer than the sequence that the cache holds already; "
            "pass a new KiviCache for a new prompt, or reset() this one"
        )
    return sdpa_mask(*args, q_length=q_length, **kwargs)


def _refuse(kwargs: dict[str, Any], **names: str) -> None:
    for option, meaning in names.items():
        if kwargs.get(option) is not None and kwargs[option] is not False:
            raise IntegrationError(
                f"the model asks for {meaning}, which attention {NAME!r} does not serve; use another attention and cache"
            )


def _rows(indices: Any) -> np.ndarray:
    array = torch.as_tensor(indices).detach().cpu().numpy()
    return np.flatnonzero(array) if array.dtype == bool else array.astype(np.int64)


def _check_backend(spec: Any, decoder: Any, options: dict[str, Any]) -> None:
    """Raises now, at construction, if no backend serves a cache of this model's shape. The choice itself falls with the first
    tokens, which say where the model runs and in which dtype."""
    heads, hidden = decoder.num_attention_heads, getattr(decoder, "hidden_size", None)
    head_dim = getattr(decoder, "head_dim", None) or (hidden and hidden // heads)
    dtype = str(getattr(decoder, "dtype", None)).removeprefix("torch.")
    if head_dim:
        shape = (heads, getattr(decoder, "num_key_value_heads", None) or heads, head_dim, None, dtype if dtype in FLOATS else "float32")
        g = geometry(*shape, None, options["max_tokens"], None)
        if options["backend"] == "auto":
            check_servable(spec, g, options["mode"], options["device"])  # the choice falls where the model runs, not yet
        else:
            resolve(options["backend"], spec, g, options["mode"], options["device"])


def _say_full_precision(config: Any, plan: list[LayerPlan]) -> None:
    full = [item for item in plan if item.store == "full"]
    if full:
        reasons = "; ".join(sorted({item.reason for item in full}))
        logger.warning(
            "%d of %d layers of this %r model stay in full precision (%s): %s",
            len(full), len(plan), config.model_type, reasons, ", ".join(str(item.layer) for item in full),
        )  # fmt: skip
