"""Findings about drafts: one small function for each kind of fault.

Source: the exporters' contract and the pitfalls of the public DFlash systems (z-lab, NeMo, SpecForge,
speculators, vLLM, SGLang, MLX, the TPU runtimes), which read one config in different ways.
"""

from collections.abc import Iterator
from typing import Any

from dflash_jax.checkpoint.inspect.facts import Facts
from dflash_jax.checkpoint.inspect.finding import Check, Finding, error, note, warning
from dflash_jax.checkpoint.keys import path_of
from dflash_jax.config import DraftConfig, TargetConfig, build_target_layer_ids, mismatches
from dflash_jax.config.dialects import FLAT_KEYS, check_window


def given_twice(f: Facts) -> Iterator[Finding]:
    """A key at the top level and in `dflash_config`, with two values."""
    for key in FLAT_KEYS if f.form == "flat" else ():
        outer, inner = f.raw.get(key), f.inner.get(key)
        if None not in (outer, inner) and outer != inner:
            yield error(
                key,
                f"{outer!r} at the top level, but {inner!r} in dflash_config: each system reads one of the two",
                "write the trained value in both places",
            )


def taps(f: Facts) -> Iterator[Finding]:
    """Tap ids, and the classic off-by-one."""
    if f.form == "orbax":
        return
    key = "aux_hidden_state_layer_ids" if f.form == "nested" else "target_layer_ids"
    ids, eagle = f.said(key), f.said("eagle_aux_hidden_state_layer_ids")
    if ids is None and eagle is None:
        yield error(
            key,
            "guessed ids are wrong for most published drafts: little or nothing is accepted",
            f"write the trained ids as {key}, or give them when loading",
        )
        return
    if eagle is not None and ids is not None and list(eagle) != [i + 1 for i in ids]:
        yield error(
            "eagle_aux_hidden_state_layer_ids",
            f"vLLM reads {eagle} as they stand, other systems {ids} plus 1: one of them taps "
            "wrong layers",
            f"write {[i + 1 for i in ids]}, or remove it",
        )
    ids = [i - 1 for i in eagle] if ids is None else [i - (f.form == "nested") for i in ids]
    yield from _shifted(f, key, ids)


def _shifted(f: Facts, key: str, ids: list[int]) -> Iterator[Finding]:
    """Judges ids in our convention: the output of layer i."""
    depth = f.integer("num_target_layers")
    if depth is None and f.target and f.target.config:
        depth = f.target.config.num_hidden_layers
    one = f.form == "nested"
    stored = [i + one for i in ids]
    told = f"{key} {stored}"
    if -1 in ids:
        yield error(
            key,
            f"{told} taps the embedding's output, which is no layer's: JAX and Python would take "
            "the last layer for -1",
            "write the ids of decoder layers, counted from " + ("1" if one else "0"),
        )
    if depth is None:
        return
    lower, higher = [i - 1 for i in stored], [i + 1 for i in stored]
    default = list(build_target_layer_ids(depth, len(ids))) if ids else []
    if sorted(set(default)) != default:  # too few layers for the formula
        default = []
    if depth in ids:
        yield error(
            key,
            f"{told} names layer {depth} of a target with {depth} layers: counted from 1, so each "
            "tap is one layer too high",
            f"write {lower}: the ids of the layers whose output is wanted",
        )
    elif default and ids == [i + 1 for i in default]:
        yield warning(
            key,
            f"{told} is one layer above the default of every trainer: ids of another convention "
            "accept a few percent less",
            f"write {lower}, unless it was trained so",
        )
    elif default and one and ids == [i - 1 for i in default]:
        yield warning(
            key,
            f"{told} is the flat dialects' default, but here 0 is the embedding: each tap is one layer too low",
            f"write {higher}, unless it was trained so",
        )
    if depth - 1 in ids and depth > 1:
        yield warning(
            key,
            f"{told} taps the last layer: after the final norm in transformers, before it in "
            "vLLM, and not at all in SGLang",
            "train with taps at least three layers below the last",
        )


def window(f: Facts) -> Iterator[Finding]:
    """Windows that are switched off."""
    if f.form == "orbax":
        return
    try:
        check_window(f.shape)
    except ValueError as e:
        field = "sliding_window" if "lacks sliding_window" in str(e) else "use_sliding_window"
        yield error(
            field,
            "transformers drops the window: layers trained with one see everything, and "
            "acceptance falls past it",
            "write use_sliding_window: true and the trained sliding_window, or make the layers full_attention",
        )
        return
    unused = f.shape.get("sliding_window") and not f.shape.get("use_sliding_window")
    if unused and not f.said("use_swa"):
        yield warning(
            "use_sliding_window",
            f"it is not true, so sliding_window={f.shape['sliding_window']} is ignored: if the "
            "draft was trained with it, acceptance falls past it",
            "write use_sliding_window: true and layer_types, or sliding_window: null",
        )


def causality(f: Facts) -> Iterator[Finding]:
    """Whether a block is causal: left to the reader, or told twice."""
    if f.form == "nested":
        yield from _nested_causality(f)
    elif f.form == "flat":
        yield from _flat_causality(f)


def _flat_causality(f: Facts) -> Iterator[Finding]:
    every, jetspec = f.said("is_causal"), f.said("causal")
    slides = "sliding_attention" in (f.shape.get("layer_types") or ())
    mixed = len(set(f.shape.get("layer_types") or ())) > 1
    if every is True and jetspec is False:
        yield error(
            "is_causal",
            "true, but dflash_config.causal is false: systems follow one or the other",
            "write what it was trained with in both",
        )
    elif every is False and jetspec is True:
        yield warning(
            "is_causal",
            "false, but dflash_config.causal is true, as NeMo's JetSpec writes it: taken as "
            "causal here, but z-lab and vLLM decode it bidirectionally",
            "write is_causal: true, or remove dflash_config.causal if it was not trained causal",
        )
    elif every is None and jetspec is not None:
        yield note(
            "is_causal",
            "only dflash_config.causal is given, which z-lab does not read",
            f"write is_causal: {str(jetspec).lower()} at the top level",
        )
    elif every is None and slides and not f.said("use_swa"):
        yield note(
            "is_causal",
            "sliding layers are causal in z-lab and SGLang if it is not given; older z-lab and "
            "the TPU runtimes decode them bidirectionally",
            "nothing says it for layers of two kinds: serve it where sliding means causal"
            if mixed
            else "write is_causal: true or false, as it was trained",
        )


def _nested_causality(f: Facts) -> Iterator[Finding]:
    every, free = f.shape.get("is_causal"), f.raw.get("sliding_window_non_causal")
    layers = f.shape.get("layer_types") or ()
    slides = "sliding_attention" in layers
    if every is True and free is True:
        yield error(
            "sliding_window_non_causal",
            "true, but transformer_layer_config.is_causal is true: systems follow one or the other",
            "write sliding_window_non_causal: false if it was trained causal, else is_causal: false",
        )
    elif slides and free is None and every is None:
        yield error(
            "sliding_window_non_causal",
            "speculators and vLLM have opposite defaults for its sliding layers",
            "write true or false, as it was trained",
        )
    elif slides and every is False and free is False:
        yield warning(
            "sliding_window_non_causal",
            "false, but transformer_layer_config.is_causal is false: the converter's default; "
            "speculators decodes the sliding layers causally",
            "write sliding_window_non_causal: true",
        )
    elif every is None and not free and (not slides or "full_attention" in layers):
        yield note(
            "sliding_window_non_causal",
            "vLLM makes full layers causal too when it is not true",
            "write is_causal in transformer_layer_config if all layers are of one kind, or export the flat dialect",
        )


def mask(f: Facts) -> Iterator[Finding]:
    """The mask id."""
    if f.form == "orbax":
        return
    field, said, id_ = "mask_token_id", f.said("mask_token_id"), f.integer("mask_token_id")
    rows = f.shape.get("vocab_size")
    if said is None:
        yield error(
            field,
            "systems take 0, the padding or fail: the block's slots are not what was trained",
            "write the trained id in dflash_config.mask_token_id",
        )
    if id_ is None:
        return
    if type(rows) is int and not 0 <= id_ < rows:
        yield error(
            field,
            f"{id_} is no row of the embedding, which has {rows}",
            "write the trained id, below vocab_size",
        )
    ends = f.shape.get("eos_token_id")
    if id_ == f.shape.get("pad_token_id"):
        yield warning(
            field,
            f"{id_} is the padding's id: often a fallback, not what was trained",
            "write the trained id, an unused row of the embedding",
        )
    if id_ in (ends if isinstance(ends, list) else [ends]):
        yield warning(
            field,
            f"{id_} is a stop id: often a fallback, not what was trained",
            "write the trained id, an unused row of the embedding",
        )
    if f.form == "flat" and not _is_dspark(f) and f.inner.get(field) is None:
        yield note(
            field,
            "it stands at the top level only: vLLM and MLX read dflash_config, and tpu-inference "
            "takes 0",
            "write it in dflash_config",
        )


def mask_in_template(f: Facts) -> Iterator[Finding]:
    """A mask whose text is part of every prompt."""
    id_ = (
        f.config.mask_token_id if isinstance(f.config, DraftConfig) else f.integer("mask_token_id")
    )
    tokenizers: list[Any] = [f.tokenizer, f.target.tokenizer if f.target else None]
    for tokenizer in tokenizers:
        if tokenizer is None or id_ is None:
            continue
        text = mask_text(tokenizer, id_)
        if text and text in (tokenizer.chat_template or ""):
            yield warning(
                "mask_token_id",
                f"its text {text!r} stands in the chat template: prompts hold it, where it is no "
                "mask, and SpecForge deletes it from the output",
                "train with an id that no text has",
            )
            return


def mask_text(tokenizer: Any, id_: int) -> str | None:
    """The text of an id, or None for a row without any."""
    return tokenizer.convert_ids_to_tokens(id_) if 0 <= id_ < len(tokenizer) else None


_PLACES = (
    ("at the top level", "older z-lab, SpecForge, tpu-inference and dflash-mlx"),
    ("in dflash_config", "newer z-lab"),
)


def block(f: Facts) -> Iterator[Finding]:
    """The block size."""
    if f.form == "orbax":
        return
    field = "block_size"
    if f.said(field) is None:
        yield error(
            field,
            "systems take 8 or 16: above the trained size every slot's proposals get worse",
            "write the trained size (anchor and proposals) at the top level and in dflash_config",
        )
        return
    places = (f.raw.get(field), f.inner.get(field))
    if f.form == "flat" and not _is_dspark(f) and None in places:
        where, who = _PLACES[places[0] is not None]
        yield note(field, f"it is not {where}, where {who} look for it", f"write it {where} too")
    size, anchored = f.integer(field), f.said("sample_from_anchor") is True
    methods = f.part("speculators_config").get("proposal_methods")
    for method in methods if isinstance(methods, list) else ():
        said = method.get("speculative_tokens") if isinstance(method, dict) else None
        if size is not None and said not in (None, size - (not anchored)):
            yield warning(
                "speculative_tokens",
                f"{said} proposals a block, but block_size={size} makes {size - (not anchored)}: the "
                "anchor is counted once too often or too little",
                f"write {size - (not anchored)}",
            )


def depth(f: Facts) -> Iterator[Finding]:
    """The target's depth."""
    if f.form == "flat" and f.raw.get("num_target_layers") is None:
        yield error(
            "num_target_layers",
            "z-lab's class fails without it, SGLang takes the draft's own depth",
            "write the number of the target's decoder layers",
        )


def names(f: Facts) -> Iterator[Finding]:
    """Tensors under names that not every system takes."""
    kinds = (
        (lambda n: n.endswith("_codebook.weight"), "MLX and vLLM do not take a codebook with .weight behind its name", "write it without .weight"),
        (lambda n: n.startswith("logit_head."), "an older SpecForge name, which vLLM, MLX and z-lab do not take", "write it without logit_head."),
        (lambda n: n.startswith("model."), "drafts have no model. prefix: vLLM adds one, z-lab does not find the tensor", "write it without model."),
        (lambda n: n.endswith("rotary_emb.inv_freq"), "RoPE follows from the config; z-lab refuses tensors that it does not know", "remove it"),
        (lambda n: f.form == "flat" and not _is_dspark(f) and path_of(n) in ("embed_tokens/weight", "lm_head/weight"),
         "vLLM and dflash-jax use the draft's own table; z-lab, MLX and SGLang use the "
"target's", "remove it if it is the target's"),
    )  # fmt: skip
    for test, effect, mend in kinds if f.form in ("flat", "nested") else ():
        found = [t.name for t in f.tensors if test(t.name)]
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            yield note(f"{found[0]}{more}", effect, mend)


def half_precision(f: Facts) -> Iterator[Finding]:
    """float16, which the features that a draft reads overflow."""
    found = [t.name for t in f.tensors if t.dtype == "float16"]
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield warning(
            f"{found[0]}{more}",
            "servers that decode in float16 overflow to NaN: taps reach 10000 and more",
            "export in bfloat16",
        )


# Classes that servers know, by a key that only its head has.
_SERVED = {
    "selector_rank": "DFlash2DraftModel",
    "markov_rank": "Qwen3DSparkModel",
    "": "DFlashDraftModel",
}


def classes(f: Facts) -> Iterator[Finding]:
    """Class names, and the code that they ask for."""
    if f.form == "flat":
        given = f.architectures
        if not given or any(name not in _SERVED.values() for name in given):
            wanted = next(c for key, c in _SERVED.items() if not key or f.said(key) is not None)
            yield note(
                "architectures",
                f"{given} names no class that z-lab's package, vLLM and SGLang know",
                f'write ["{wanted}"]',
            )
        if "dflash_config" in f.raw and f.raw["dflash_config"] is None:
            yield note(
                "dflash_config",
                "null makes z-lab's package fail",
                "write an object with block_size, mask_token_id and target_layer_ids",
            )
    for value in f.part("auto_map").values() if f.all_files else ():
        file = f"{str(value).split('--')[-1].split('.')[0]}.py"
        if not (f.path / file).is_file():
            yield note(
                "auto_map",
                f"{value} asks for {file}, which is not there: loading with trust_remote_code fails",
                "remove auto_map, or add the file",
            )


def _is_dspark(f: Facts) -> bool:
    return f.said("markov_rank") is not None


def pair(f: Facts) -> Iterator[Finding]:
    """Whether the draft was made for the target it is judged with."""
    other = f.target
    if other is None:
        return
    if not isinstance(other.config, TargetConfig):
        said = "; ".join(other.refusals.values())
        yield error("--target", f"the target cannot be read: {said}", "inspect it by itself")
        return
    if not isinstance(f.config, DraftConfig):
        return
    for field, said in mismatches(other.config, other.stop_token_ids, f.config, other.pad_token_id):
        yield error(
            field,
            f"{said}: the draft was made for another target",
            "name the target that it was trained for, or correct the field",
        )
    mine, theirs = f.config.rope.theta, other.config.rope.theta
    if mine != theirs:
        yield note(
            "rope_theta",
            f"the draft's {mine:g} is not the target's {theirs:g}: right for a draft trained so, "
            "but tpu-inference rotates it with the target's",
            "nothing to write if it was trained so",
        )
    vocabularies = [t.get_vocab() for t in (f.tokenizer, other.tokenizer) if t is not None]
    if len(vocabularies) == 2 and vocabularies[0] != vocabularies[1]:
        yield warning(
            "tokenizer",
            "the draft's tokenizer has other ids than the target's: a draft of another model "
            "accepts next to nothing",
            "name the target that it was trained for",
        )


DRAFT: tuple[Check, ...] = (
    given_twice, taps, window, causality, mask, mask_in_template, block, depth, names, half_precision, classes, pair,
)  # fmt: skip
