"""Findings about targets and drafts alike, and about targets."""

import re
from collections.abc import Iterator, Sequence

from dflash_jax.checkpoint.inspect.facts import Facts
from dflash_jax.checkpoint.inspect.finding import Check, Finding, error, note, warning
from dflash_jax.checkpoint.keys import Fault, path_of
from dflash_jax.config import DraftConfig, RopeConfig

# How the reader's messages begin what a finding's field is called.
_ALIASES = {"aux_hidden_state_layer_ids": "target_layer_ids", "rope_parameters": "rope_"}


def refused(f: Facts, found: Sequence[Finding]) -> Iterator[Finding]:
    """What our readers refuse and no error finding names."""
    for part, message in f.refusals.items():
        said = message.removeprefix(f"{f.path}: ")
        if part == "tokenizer":
            yield warning(
                part,
                f"no text can be encoded or decoded: {said}",
                "copy the target's tokenizer files anew",
            )
            continue
        named = [_ALIASES.get(x.field, x.field) for x in found if x.severity == "error"]
        if any(re.search(rf"\b{re.escape(name)}", said) for name in named):
            continue
        unknown = re.search(r"not understood: (.*)", said)
        keys = {**f.raw, **f.inner, **f.shape, **dict.fromkeys(DraftConfig.__dataclass_fields__)}
        words = [w for w in re.findall(r"\w+", said) if w in keys]
        if unknown:
            yield error(
                unknown[1],
                "dflash-jax does not know the key, and what it changes in the draft; the checkpoint "
                "is refused",
                "remove it if it is bookkeeping; otherwise the checkpoint needs a program that knows it",
            )
        elif part == "config":
            yield error(
                words[0] if words else "config.json",
                f"the checkpoint is refused: {said}",
                "write what the message asks for",
            )
        elif part == "tensors":
            where = {"gguf": f.path.name, "orbax": "params"}.get(f.form, "model.safetensors")
            yield error(where, f"the weights cannot be read: {said}", "copy or download them anew")
        else:
            yield error(
                part, f"the checkpoint is refused: {said}", f"write token ids as {part}, or null"
            )


_TENSORS = {
    "unknown": ("no reader knows {}: what was trained in it would be lost, so the checkpoint is "
"refused", "give it the name that its dialect has for it, or remove it"),
    "missing": ("without {} the model cannot be built", "export it again with all its tensors"),
    "misshapen": ("{} does not fit the config, so the checkpoint is refused", "write the config that it was trained with"),
    "duplicated": ("two values for one parameter ({}): systems take one or the other", "remove one of the two"),
    "values": ("{}: every output would be NaN or nothing, and no proposal accepted", "export it again from a sound training checkpoint, with this tensor initialised"),
    "tied": ("{}: systems that tie use another head than systems that do not", "write tie_word_embeddings: false, or remove lm_head.weight"),
    "vocabulary": ("the draft proposes other ids than it was trained on: {}", "write d2t[i] = target id - i for ascending ids, and t2d true at just those ids"),
}  # fmt: skip
_FUSED = ("fc.weight", "lm_head.weight")


def tensor_faults(f: Facts) -> Iterator[Finding]:
    """Unknown, missing, duplicated and misshapen tensors, and values that cannot be meant."""
    for kind, (effect, mend) in _TENSORS.items():
        faults = [x for x in f.faults if x.kind == kind and not _is_special(x)]
        if faults:
            more = len(faults) - 3
            names = ", ".join(x.name for x in faults[:3]) + (
                f" and {more} more" if more > 0 else ""
            )
            said = "; ".join(x.said for x in faults[:3])
            yield error(names, effect.format(said), mend)
    for fault in filter(_is_special, f.faults):
        if fault.name == "lm_head.weight":
            yield error(
                fault.name,
                "tie_word_embeddings is false, but the file has no head: some systems initialise one "
                "at random",
                "write tie_word_embeddings: true if the head is the embedding, else add lm_head.weight",
            )
        else:
            yield error(
                fault.name,
                f"{fault.said}: its width must be the number of taps times hidden_size, so the taps "
                "are not those of the training",
                "write the target_layer_ids that it was trained with",
            )


def _is_special(fault: Fault) -> bool:
    return (path_of(fault.name), fault.kind) in (("fc/weight", "misshapen"), ("lm_head/weight", "missing"))  # fmt: skip


def rope(f: Facts) -> Iterator[Finding]:
    """RoPE in transformers 4's form, 5's, both, or none."""
    if f.form in ("orbax", "gguf"):
        return
    c = f.shape
    old, new = c.get("rope_theta"), c.get("rope_parameters")
    if old is None and (not isinstance(new, dict) or new.get("rope_theta") is None):
        yield error(
            "rope_theta",
            "systems fall back on 10000 or 1000000: unless that is the trained base, nothing is "
            "accepted",
            "write the trained base as rope_theta and in rope_parameters",
        )
        return
    try:
        RopeConfig.from_hf(c)
    except ValueError as e:
        yield error(
            "rope_parameters",
            f"{e}: systems rotate by what they know of it, and not as it was trained",
            "write the trained base and scaling in rope_theta and rope_scaling and again in rope_parameters",
        )
        return
    new = new or {}
    scaled = new.get("rope_type", "default") != "default"
    if old is not None and scaled and not c.get("rope_scaling"):
        yield warning(
            "rope_scaling",
            "rope_parameters has a scaling, but rope_theta stands without it: readers of the "
            "older form rotate unscaled",
            "write the same scaling as rope_scaling",
        )
    elif f.form == "nested":
        return
    elif old is None:
        yield note(
            "rope_theta",
            "sglang-jax, tpu-inference and transformers 4 read only this form, and fall back on "
            "their default base",
            "write rope_theta and rope_scaling beside rope_parameters",
        )
    elif not new:
        yield note(
            "rope_parameters",
            "readers of the transformers 5 form alone do not find the base",
            "write rope_parameters beside rope_theta and rope_scaling",
        )


def heads(f: Facts) -> Iterator[Finding]:
    """The heads' number and width."""
    get = lambda key: f.shape[key] if type(f.shape.get(key)) is int else None
    width, count, groups, hidden = map(get, ("head_dim", "num_attention_heads", "num_key_value_heads", "hidden_size"))  # fmt: skip
    qwen3 = f.shape.get("model_type", "qwen3") == "qwen3"
    if width is None and qwen3 and f.form != "orbax":
        yield error(
            "head_dim",
            "systems take 128 or hidden_size / num_attention_heads: with the wrong one it does not load",
            "write the width of one head: q_proj's rows / num_attention_heads",
        )
    elif width and width % 2:
        yield error(
            "head_dim", f"{width} is odd: RoPE rotates two halves", "write the trained, even width"
        )
    if count and groups and count % groups:
        yield error(
            "num_key_value_heads",
            f"{count} query heads cannot share {groups} key heads",
            "write the trained number: k_proj's rows / head_dim",
        )
    if f.kind == "draft" and width and count and hidden and width * count != hidden:
        yield note(
            "head_dim",
            f"{width} is not hidden_size / num_attention_heads = {hidden / count:g}: "
            "tpu-inference allocates its cache by that",
            "nothing to write; serve it with another system, or train with that width",
        )


def tokenizer_size(f: Facts) -> Iterator[Finding]:
    """A tokenizer with more ids than the model has rows."""
    size = f.config.vocab_size if f.config else f.shape.get("vocab_size")
    if f.tokenizer is not None and size and len(f.tokenizer) > size:
        yield warning(
            "vocab_size",
            f"the tokenizer has {len(f.tokenizer)} ids, the model {size} rows: ids without a row "
            "are read as another token",
            "use the tokenizer that the model was trained with",
        )


def stops(f: Facts) -> Iterator[Finding]:
    """Ids that end a text."""
    if not f.stop_token_ids and "eos_token_id" not in f.refusals:
        yield warning(
            "eos_token_id",
            "no id ends a text: every answer runs to max_new_tokens",
            "write eos_token_id in generation_config.json",
        )
    rows = f.config.vocab_size if f.config else None
    outside = [i for i in f.stop_token_ids if rows is not None and i >= rows]
    if outside:
        yield warning(
            "eos_token_id",
            f"{outside} are no rows of the head, which has {rows}: they never end a text",
            "write the ids of this model's tokenizer",
        )


def tokenizer(f: Facts) -> Iterator[Finding]:
    """A target without a tokenizer."""
    if f.tokenizer is None and "tokenizer" not in f.refusals:
        yield note(
            "tokenizer",
            "only token ids can be decoded, no text",
            "copy the model's tokenizer files into the folder",
        )


COMMON: tuple[Check, ...] = (tensor_faults, rope, heads, tokenizer_size)
TARGET: tuple[Check, ...] = (stops, tokenizer)
