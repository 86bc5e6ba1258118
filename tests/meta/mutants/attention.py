"""Mutants of attention: each overrides one decision of `Attention`."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np

from kivi.backends.reference import attention as reference
from tests.meta.mutants import mutant
from tests.meta.steps import Attention


def fault(cls):
    """Register a subclass of `Attention` as a mutant."""

    def place(patch):
        patch.setattr(reference, "attend", cls())

    place.__name__, place.__doc__ = cls.__name__, cls.__doc__
    return mutant(place)


def parts(scores, cut):
    return [slice(0, cut), slice(cut, len(scores))] if 0 < cut < len(scores) else [slice(0, len(scores))]


@fault
class softmax_per_part(Attention):
    """Sealed and floating keys have a softmax each; the results are averaged."""

    def row(self, scores, values):
        outs = [self.weights(scores[p]) @ values[p] for p in parts(scores, int(self.reading.key_sealed[self.b]))]
        return sum(outs) / len(outs)


@fault
class parts_merged_without_maximum(Attention):
    """Split softmax: the parts' sums are merged without correcting for their maxima."""

    def row(self, scores, values):
        total = weight = 0.0
        for p in parts(scores, 16):
            w = np.exp(scores[p] - scores[p].max())
            total, weight = total + w @ values[p], weight + w.sum()
        return total / weight


@fault
class key_boundary_for_values(Attention):
    """Values are read as if they were sealed up to the key boundary."""

    def values(self, v):
        wrong = replace(self.reading, value_sealed=self.reading.key_sealed)
        return reference.history(wrong, self.b, "value", v)


@fault
class value_boundary_for_keys(Attention):
    """Keys are read floating from the value boundary on."""

    def keys(self, k):
        return reference.history(replace(self.reading, key_sealed=self.reading.value_sealed), self.b, "key", k)


@fault
class probabilities_cut_at_key_boundary(Attention):
    """The quantized values are weighted by the probabilities of the quantized keys, shifted against each other."""

    def row(self, scores, values):
        ks, vs = int(self.reading.key_sealed[self.b]), int(self.reading.value_sealed[self.b])
        p = self.weights(scores)
        return np.roll(p, 1) @ values if 0 < vs < ks else p @ values


@fault
class no_softmax_scale(Attention):
    """1/sqrt(D) is missing."""

    def scale(self):
        return 1.0


@fault
class scale_of_padded_dim(Attention):
    """1/sqrt of the head dimension rounded up to a power of two."""

    def request(self, q, keys, values, scale):
        d = q.shape[2]
        return super().request(q, keys, values, scale * (d / (1 << (d - 1).bit_length())) ** 0.5)


@fault
class scale_of_value_dim(Attention):
    """1/sqrt of the values' head dimension."""

    def request(self, q, keys, values, scale):
        return super().request(q, keys, values, scale * (q.shape[2] / values.shape[2]) ** 0.5)


@fault
class heads_interleaved(Attention):
    """Query head h reads KV head h mod Hkv."""

    def head(self, h, q_heads, kv_heads):
        return h % kv_heads


@fault
class first_head_for_all(Attention):
    """Every query head of a group reads the first KV head when there are more than four."""

    def head(self, h, q_heads, kv_heads):
        return 0 if q_heads > 4 else super().head(h, q_heads, kv_heads)


@fault
class masked_token_attended(Attention):
    """Each row of a chunk sees one token too many."""

    def visible(self, row, rows, tokens):
        return min(tokens, super().visible(row, rows, tokens) + 1)


@fault
class own_token_hidden(Attention):
    """Rows of a chunk do not see themselves."""

    def visible(self, row, rows, tokens):
        return max(1, super().visible(row, rows, tokens) - (rows > 1))


@fault
class no_causal_mask(Attention):
    """Rows of a chunk see the whole chunk."""

    def visible(self, row, rows, tokens):
        return tokens


@fault
class mask_aligned_to_start(Attention):
    """The causal mask of a chunk is aligned to the first token instead of the last."""

    def visible(self, row, rows, tokens):
        return row + 1 if 1 < rows < tokens else super().visible(row, rows, tokens)


@fault
class slightly_too_large(Attention):
    """Outputs are multiplied by 1 + 1e-3."""

    def output(self, rows, dtype):
        return super().output(rows * (1 + 1e-3), dtype)


@fault
class first_token_dropped(Attention):
    """The oldest token is not attended to once anything is sealed."""

    def row(self, scores, values):
        start = 1 if self.reading.key_sealed[self.b] else 0
        return super().row(scores[start:], values[start:])


@fault
class page_edge_dropped(Attention):
    """The last token of the second page is left out."""

    def row(self, scores, values):
        if len(scores) > 32:
            scores, values = np.delete(scores, 31), np.delete(values, 31, 0)
        return super().row(scores, values)


@fault
class last_sealed_doubled(Attention):
    """The last sealed token counts twice."""

    def row(self, scores, values):
        ks = int(self.reading.key_sealed[self.b])
        if ks:
            scores, values = np.append(scores, scores[ks - 1]), np.append(values, values[ks - 1 : ks], 0)
        return super().row(scores, values)


@fault
class no_maximum(Attention):
    """exp without subtracting the maximum."""

    def weights(self, scores):
        p = np.exp(scores)
        return p / p.sum()


@fault
class maximum_starts_at_zero(Attention):
    """The running maximum starts at 0 instead of minus infinity."""

    def weights(self, scores):
        p = np.exp(scores - max(0.0, scores.max()))
        return p / p.sum()


@fault
class small_weights_flushed(Attention):
    """Weights below 2^-11 are dropped."""

    def weights(self, scores):
        p = super().weights(scores)
        return np.where(p < 2.0**-11, 0, p)


@fault
class half_probabilities(Attention):
    """Probabilities pass through fp16, which the manifest does not declare."""

    def weights(self, scores):
        return super().weights(scores).astype(np.float16).astype(np.float64)


@fault
class half_scores(Attention):
    """Logits pass through fp16, which the manifest does not declare."""

    def scores(self, q, keys):
        return super().scores(q, keys).astype(np.float16).astype(np.float64)


@fault
class half_keys(Attention):
    """Keys are dequantized to fp16 before the product."""

    def keys(self, k):
        return super().keys(k).astype(np.float16).astype(np.float64)


@fault
class single_precision(Attention):
    """Sums in fp32, where the manifest declares float64."""

    def row(self, scores, values):
        p = np.exp((scores - scores.max()).astype(np.float32))
        return (p / p.sum(dtype=np.float32)) @ values.astype(np.float32)


@fault
class truncated_bf16_output(Attention):
    """bf16 outputs keep the upper half of the bits."""

    def output(self, rows, dtype):
        if dtype != np.dtype(ml_dtypes.bfloat16):
            return super().output(rows, dtype)
        return (rows.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)


@fault
class truncated_half_output(Attention):
    """fp16 outputs are truncated."""

    def output(self, rows, dtype):
        out = super().output(rows, dtype)
        if dtype != np.float16:
            return out
        beyond = np.abs(out.astype(np.float64)) > np.abs(rows)
        return np.where(beyond, np.nextafter(out, np.float16(0)), out)


@fault
class wide_heads_cut(Attention):
    """Channels from 128 on do not take part in the scores."""

    def scores(self, q, keys):
        return super().scores(q[:128], keys[:, :128])


@fault
class tail_channels_cut(Attention):
    """Channels beyond the last multiple of 32 do not take part in the scores."""

    def scores(self, q, keys):
        d = len(q) // 32 * 32 or len(q)
        return super().scores(q[:d], keys[:, :d])


@fault
class negative_scale_ignored(Attention):
    """The softmax scale loses its sign."""

    def scale(self):
        return abs(self.reading.scale)


@fault
class length_of_first_request(Attention):
    """Every request is read at the length of request 0."""

    def request(self, q, keys, values, scale):
        tokens = int(self.reading.stored[0] + self.reading.chunk[0])
        if 0 < tokens < keys.shape[1] and tokens >= q.shape[1]:
            keys, values = keys[:, -tokens:], values[:, -tokens:]
        return super().request(q, keys, values, scale)


@fault
class padding_attended(Attention):
    """A ragged chunk's padding rows join the history of decode steps."""

    def __call__(self, reading, q, k, v):
        out = super().__call__(reading, q, k, v)
        for b, count in enumerate(reading.counts):
            if 0 < count < q.shape[2]:
                out[b, :, count:] = out[b, :, count - 1 : count]
        return out


@fault
class neighbour_read(Attention):
    """Requests after the first read the floating keys of the one before when they take part with a single token."""

    def keys(self, k):
        own = super().keys(k)
        if self.b and self.reading.counts[self.b] == 1:
            before = np.roll(k, 1, axis=0)
            return reference.history(self.reading, self.b, "key", before)
        return own


@fault
class origin_forgotten_in_long_history(Attention):
    """From the third page on, values are read without their origin."""

    def values(self, v):
        values = super().values(v)
        sealed = int(self.reading.value_sealed[self.b])
        if sealed > 32:
            values[:, 32:sealed] -= values[:, 32:sealed].min(-1, keepdims=True)
        return values


@fault
class values_of_neighbouring_token(Attention):
    """In the middle zone (key sealed, value floating) values are shifted by one token."""

    def values(self, v):
        values = super().values(v)
        vs, ks = int(self.reading.value_sealed[self.b]), int(self.reading.key_sealed[self.b])
        if 0 < vs < ks:
            values[:, vs:ks] = np.roll(values[:, vs:ks], 1, axis=1)
        return values


@fault
class nan_reaches_earlier_rows(Attention):
    """Rows that may not see a NaN get it through 0 * NaN."""

    def request(self, q, keys, values, scale):
        out = super().request(q, keys, values, scale)
        poisoned = np.isnan(values).any((0, 1)) | np.isnan(keys).any()
        out[..., poisoned] = np.nan
        return out


@fault
class tokens_beyond_128_dropped(Attention):
    """A query sees 128 tokens at most, the oldest ones."""

    def row(self, scores, values):
        return super().row(scores[:128], values[:128])


@fault
class tokens_beyond_256_dropped(Attention):
    """A query sees 256 tokens at most, the oldest ones."""

    def row(self, scores, values):
        return super().row(scores[:256], values[:256])


@fault
class tokens_before_the_last_256_dropped(Attention):
    """A query sees 256 tokens at most, the newest ones."""

    def row(self, scores, values):
        return super().row(scores[-256:], values[-256:])


@fault
class sealed_tokens_beyond_256_dropped(Attention):
    """Of the sealed tokens the first 256 are read."""

    def row(self, scores, values):
        sealed = int(self.reading.key_sealed[self.b])
        scores = np.where((np.arange(len(scores)) >= 256) & (np.arange(len(scores)) < sealed), -np.inf, scores)
        return super().row(scores, values)


@fault
class floating_tokens_beyond_256_dropped(Attention):
    """Of the floating rows of the cache the first 256 are read."""

    def row(self, scores, values):
        sealed, stored = int(self.reading.key_sealed[self.b]), int(self.reading.stored[self.b])
        scores = np.where((np.arange(len(scores)) >= sealed + 256) & (np.arange(len(scores)) < stored), -np.inf, scores)
        return super().row(scores, values)


class PageTwice(Attention):
    """Page `page` is read from where the one before it lies."""

    page = 0

    def again(self):
        table = self.reading.table.copy()
        if table.shape[1] > self.page:
            table[:, self.page, 0] = table[:, self.page - 1, 0]
        return replace(self.reading, table=table)

    def keys(self, k):
        return reference.history(self.again(), self.b, "key", k)

    def values(self, v):
        return reference.history(self.again(), self.b, "value", v)


@fault
class ninth_page_reads_the_eighth(PageTwice):
    """The ninth page of a request reads the eighth."""

    page = 8


@fault
class seventeenth_page_reads_the_sixteenth(PageTwice):
    """The seventeenth page of a request reads the sixteenth."""

    page = 16
