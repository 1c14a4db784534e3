"""Drafts against dflash 0.1.0 on the CPU, live: what it decodes, we decode, and it loads what we write."""

import dataclasses
import functools
import json

import pytest
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel, dflash_generate
from transformers import AutoModelForCausalLM

from dflash_jax import generate, load_draft, load_target
from dflash_jax.checkpoint.export import save_draft
from dflash_jax.pair import (
    embedded_target,
    load_tokenizer,
    read_draft,
    read_draft_config,
)

# dflash 0.1.0 calls transformers by names that it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

# Every flat golden draft but Domino's, whose head dflash 0.1.0 does not have.
DRAFTS = [
    "dflash_full", "dflash_headdim", "dflash_old_layout", "dflash_default_ids", "dflash_sliding_causal",
    "dflash_sliding_bidirectional", "dflash_mixed", "dflash_all_causal", "dflash_yarn", "dflash_softcap",
    "dflash2", "dflash2_sliding",
]  # fmt: skip


def decode(model, target, prompt, count, stop=None):
    """New ids by dflash 0.1.0, greedy."""
    ids = dflash_generate(model, target, torch.tensor([prompt]), count, stop)
    return ids[0, len(prompt) :].tolist()


def prompt(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 250, (9 + 5 * seed,), generator=generator).tolist()


@functools.cache
def theirs(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", DRAFTS)
def test_our_export_is_the_original_to_dflash(name, golden, tmp_path):
    source = golden / "drafts" / name
    folder = golden / json.loads((source / "case.json").read_text())["target"]
    ids = "default" if name == "dflash_default_ids" else None
    draft = read_draft(source, read_draft_config(source, ids))
    save_draft(tmp_path / "ours", draft.config, draft.params, None)
    kind = DFlash2DraftModel if name.startswith("dflash2") else DFlashDraftModel
    original = kind.from_pretrained(source, dtype=torch.float32).eval()
    exported = kind.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    for key, value in original.state_dict().items():
        torch.testing.assert_close(exported.state_dict()[key], value, rtol=0, atol=0)
    for seed in range(2):
        expected = decode(original, theirs(folder), prompt(seed), 40)
        assert decode(exported, theirs(folder), prompt(seed), 40) == expected


@pytest.mark.parametrize("name", DRAFTS[:3])
def test_our_export_decodes_in_dflash_as_here(name, golden, tmp_path):
    case = json.loads((golden / "drafts" / name / "case.json").read_text())
    folder = golden / case["target"]
    target = load_target(folder)
    draft = load_draft(golden / "drafts" / name, target)
    save_draft(tmp_path / "ours", draft.config, draft.params, dtype="float32")
    exported = DFlashDraftModel.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    for seed in range(3):
        ours = generate(target, draft, [prompt(seed)], max_new_tokens=40, stop_token_ids=())
        assert decode(exported, theirs(folder), prompt(seed), 40) == ours.tokens[0]


def test_the_embedded_drafts_layers_decode_in_dflash_as_here(tmp_path):
    """Without its Domino head and its vocabulary, which are none of dflash's."""
    path, target = embedded_target(), load_target()
    embedded = load_draft(None, target)
    config = dataclasses.replace(embedded.config, head=None, draft_vocab_size=None, own_head=False)
    params = {k: v for k, v in embedded.params.items() if k.startswith(("fc", "hidden_norm", "norm", "layers_"))}  # fmt: skip
    save_draft(tmp_path / "draft", config, params, dtype="float32")
    theirs_target = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    theirs = DFlashDraftModel.from_pretrained(tmp_path / "draft", dtype=torch.float32).eval()
    tokenizer = load_tokenizer(target)
    message = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    ours = generate(target, load_draft(tmp_path / "draft", target), [prompt], max_new_tokens=40)
    assert decode(theirs, theirs_target.eval(), prompt, 40, [2]) == ours.tokens[0]
    assert ours.acceptance_length > 1.2
