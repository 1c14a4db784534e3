"""Our exports in speculators' dialect, loaded by speculators 0.9.0 on the CPU: the same draft logits as ours."""

import dataclasses
import json
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from dflash_jax import Draft, load_draft, load_target
from dflash_jax.adapters import DraftModel, TargetModel
from dflash_jax.checkpoint import keys
from dflash_jax.checkpoint.export import save_draft
from dflash_jax.config import DSpark
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.models.transformer import Transformer

with warnings.catch_warnings(action="ignore"):  # torch's own, when it is compiled with
    from speculators import SpeculatorModel, SpeculatorModelConfig

# speculators 0.9.0 was written for an older transformers and pydantic.
pytestmark = pytest.mark.filterwarnings("ignore")

# Those of z-lab's whose every layer is full attention, and speculators' own, windows included.
DRAFTS = [
    "dflash_full", "dflash_yarn", "dflash2", "speculators_full", "speculators_reduced_vocab",
    "speculators_sliding_causal", "speculators_sliding_noncausal",
]  # fmt: skip
LENGTH = 32


def ours(target, draft, features, ids, anchors):
    """Logits of every slot of the blocks at `anchors`, before any draft head."""
    c = draft.config
    model = TargetModel(Transformer(target.config, c.target_layer_ids, c.last_tap))
    fns = DraftModel(DFlashDraftModel(c), model)
    params = {"target": target.params, "draft": draft.params}
    blocks = np.full((len(anchors), c.block_size), c.mask_token_id, np.int32)
    blocks[:, 0] = ids[anchors]
    x = fns.embed(params, jnp.asarray(blocks.reshape(1, -1)))
    context, anchors = jnp.asarray(features.T[:, None]), jnp.asarray(anchors[None], jnp.int32)
    hidden = fns.module.apply({"params": draft.params}, x, context, anchors, method="blocks")
    return np.asarray(fns.logits(params, hidden))[:, 0].T


def theirs(folder, draft, features, ids, anchors):
    """The same by speculators' own training forward."""
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=config).eval()
    model.load_verifier_weights()
    for name, value in model.state_dict().items():
        assert not (value.is_floating_point() and value.isnan().any()), name
    picked = torch.zeros(1, LENGTH)
    picked[0, anchors] = 1
    last = torch.zeros(1, LENGTH, draft.config.hidden_size)  # serves the loss only
    with torch.no_grad():
        out = model._backbone_forward(
            torch.from_numpy(features)[None], torch.from_numpy(ids)[None].long(), picked, last,
            torch.zeros(1, LENGTH, dtype=torch.long), max_anchors=len(anchors),
        )  # fmt: skip
    return model, out[1][0].numpy()


def check(target, draft, folder):
    c = draft.config
    rng = np.random.default_rng(0)
    features = rng.standard_normal((LENGTH, len(c.target_layer_ids) * c.hidden_size), np.float32)
    ids = rng.integers(2, 250, LENGTH)
    anchors = np.array([3, 11, 20])
    save_draft(
        folder, c, draft.params, "float32", dialect="speculators", verifier=str(target.source)
    )
    model, logits = theirs(folder, draft, features, ids, anchors)
    expected = ours(target, draft, features, ids, anchors)
    np.testing.assert_allclose(logits, expected, rtol=2e-5, atol=2e-5)
    assert np.abs(expected).max() > 0.1
    return model


@pytest.mark.parametrize("name", DRAFTS)
def test_our_export_has_our_draft_logits_in_speculators(name, golden, tmp_path):
    case = json.loads((golden / "drafts" / name / "case.json").read_text())
    target = load_target(golden / case["target"])
    draft = load_draft(golden / "drafts" / name, target)
    model = check(target, draft, tmp_path / "ours")
    saved = keys.flatten(draft.params)
    if draft.config.draft_vocab_size is not None:
        rows = np.arange(draft.config.draft_vocab_size) + np.asarray(saved["d2t"])
        np.testing.assert_array_equal(model.t2d.nonzero()[:, 0].numpy(), rows)
    if name == "dflash2":
        for book in ("predecessor_codebook", "successor_codebook"):
            theirs = model.state_dict()[f"candidate_selector.{book}"].numpy()
            np.testing.assert_array_equal(theirs, saved[f"candidate_selector/{book}"])


def test_a_dspark_export_loads_with_its_head(golden, tmp_path):
    target = load_target(golden / "targets/qwen3_gqa")
    plain = load_draft(golden / "drafts/dflash_full", target)
    rng = np.random.default_rng(1)
    w1, w2 = (jnp.asarray(rng.standard_normal((256, 4), np.float32)) for _ in range(2))
    head = {"markov_head": {"markov_w1": {"weight": w1}, "markov_w2": {"weight": w2}}}
    config = dataclasses.replace(
        plain.config, head=DSpark(markov_rank=4), sample_from_anchor=True, window_rule="speculators"
    )
    draft = Draft(config, {**plain.params, **head}, plain.source)
    model = check(target, draft, tmp_path / "ours")
    assert model.config.sample_from_anchor
    assert model.confidence_head is None
    np.testing.assert_array_equal(model.markov_head.markov_w1.weight.detach().numpy(), w1)
    tokens = torch.tensor([[7, 9]])
    bias = model.markov_head.block_bias(prev_token_ids=tokens, hidden_states=torch.zeros(1, 2, 48))
    np.testing.assert_allclose(bias[0].detach().numpy(), w1[jnp.array([7, 9])] @ w2.T, rtol=1e-5)
