"""Drafts against dflash 0.1.0 on the CPU, live: what it decodes, we decode, and it loads what we write."""

import json

import pytest
import torch
from dflash.model import DFlashDraftModel, dflash_generate
from transformers import AutoModelForCausalLM

from dflash_jax import generate, load_draft, load_target
from dflash_jax.checkpoint.export import save_draft
from dflash_jax.pair import EMBEDDED_DRAFT, embedded_target, load_tokenizer

# dflash 0.1.0 calls transformers by names that it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

DRAFTS = ["dflash_full", "dflash_headdim", "dflash_old_layout"]


def decode(model, target, prompt, count, stop=None):
    """New ids by dflash 0.1.0, greedy."""
    ids = dflash_generate(model, target, torch.tensor([prompt]), count, stop)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", DRAFTS)
def test_our_export_decodes_in_dflash_as_the_original_and_as_ours(name, golden, tmp_path):
    case = json.loads((golden / "drafts" / name / "case.json").read_text())
    folder = golden / case["target"]
    target = load_target(folder)
    draft = load_draft(golden / "drafts" / name, target)
    save_draft(tmp_path / "ours", draft.config, draft.params, dtype="float32")
    theirs_target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    original = DFlashDraftModel.from_pretrained(
        golden / "drafts" / name, dtype=torch.float32
    ).eval()
    exported = DFlashDraftModel.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    for key, value in original.state_dict().items():
        torch.testing.assert_close(exported.state_dict()[key], value, rtol=0, atol=0)
    for seed in range(3):
        prompt = torch.randint(
            2, 250, (9 + 5 * seed,), generator=torch.Generator().manual_seed(seed)
        ).tolist()
        ours = generate(target, draft, [prompt], max_new_tokens=40, stop_token_ids=())
        assert decode(original, theirs_target, prompt, 40) == ours.tokens[0]
        assert decode(exported, theirs_target, prompt, 40) == ours.tokens[0]


def test_the_embedded_pair_decodes_in_dflash_as_here():
    path = embedded_target()
    target = load_target()
    draft = load_draft(None, target)
    theirs_target = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    theirs = DFlashDraftModel.from_pretrained(EMBEDDED_DRAFT, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(target)
    message = [{"role": "user", "content": "How do I boil an egg?"}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    ours = generate(target, draft, [prompt], max_new_tokens=40)
    assert decode(theirs, theirs_target.eval(), prompt, 40, [2]) == ours.tokens[0]
