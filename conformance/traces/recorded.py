"""Keys, values and queries of a real model after RoPE (golden/README.md): channel outliers as they are."""

from __future__ import annotations

from kivi.conformance.case import Attend, Case, Geometry, Quantize, Stream, decode, spec_of
from kivi.conformance.inputs import golden, make


def cases() -> list[Case]:
    out: list[Case] = []
    for layer, name in enumerate((0, 15, 29)):
        for head in range(3):
            quick = head == layer
            spec = spec_of({"key.group": 32, "key.residual": 32, "value.group": 32, "value.residual": 32})
            out.append(Stream(id=f"stream/recorded.layer{name}.head{head}", about="layer of SmolLM2-135M, three query heads", spec=spec, inputs=make("recorded", layer=layer, head=head),
                              geometry=Geometry(1, 3, 1, 64, dtype="float16"), events=(Attend(50), *decode(4), Attend(16)), size="quick" if quick else "full"))  # fmt: skip
        for i, which in enumerate(("key", "value")):
            out.append(Quantize(id=f"quantize/recorded.layer{name}.{which}", about="a layer of SmolLM2-135M", spec=spec_of({"key.group": 16, "key.residual": 64, "value.group": 16, "value.residual": 64}),  # type: ignore[arg-type]
                                which=which, make=lambda layer=layer, i=i: golden("smollm2")["kv"][layer, i, :, -64:][None], dtype="float16"))  # fmt: skip
    spec = spec_of({"key.group": 32, "key.residual": 128, "value.group": 32, "value.residual": 128})
    out.append(Stream(id="stream/recorded.preset", about="group and residual of the presets, 176 tokens", spec=spec, inputs=make("recorded", layer=1, head=1), size="full",
                      geometry=Geometry(1, 3, 1, 64, dtype="float16"), events=(Attend(112), *decode(60), Attend(4))))  # fmt: skip
    return out
