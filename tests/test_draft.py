import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import DRAFT, TARGET, random_params
from safetensors.numpy import load_file

from dflash_jax import Draft, Target, generate, load_draft, load_target
from dflash_jax.adapters import DraftModel, TargetModel
from dflash_jax.cache import KVCache
from dflash_jax.models.draft import DFlashDraftModel
from dflash_jax.models.transformer import Transformer
from dflash_jax.states import new_draft_cache

CASES = [
    "dflash_full", "dflash_headdim", "dflash_old_layout", "dflash_default_ids", "dflash_sliding_causal",
    "dflash_sliding_bidirectional", "dflash_mixed", "dflash_all_causal", "dflash_yarn", "dflash_softcap",
]  # fmt: skip
DECODED = [*CASES, "speculators_full", "speculators_reduced_vocab"]
QUICK = ("dflash_mixed", "speculators_reduced_vocab")
TRAINED = [
    "speculators_full", "speculators_reduced_vocab", "speculators_sliding_causal", "speculators_sliding_noncausal",
]  # fmt: skip
SLOTS = 48
CONTEXT = 11


@dataclasses.dataclass(frozen=True)
class Case:
    target: Target
    draft: Draft
    expected: dict[str, np.ndarray]
    info: dict

    def close(self, actual, expected, kind):
        np.testing.assert_allclose(actual, expected, **self.info["tolerances"][kind])


@functools.cache
def load_case(golden, name):
    folder = golden / "drafts" / name
    info = json.loads((folder / "case.json").read_text())
    target = load_target(golden / info["target"], dtype=jnp.float32)
    ids = "default" if name == "dflash_default_ids" else None
    draft = load_draft(folder, target, target_layer_ids=ids, dtype=jnp.float32)
    return Case(target, draft, load_file(folder / "expected.safetensors"), info)


@pytest.fixture(params=CASES)
def case(request, golden):
    return load_case(golden, request.param)


# Each compiles programs of its own.
@pytest.fixture(
    params=[c if c in QUICK else pytest.param(c, marks=pytest.mark.deep) for c in DECODED]
)
def decoded(request, golden):
    return load_case(golden, request.param)


@pytest.fixture(params=TRAINED)
def trained(request, golden):
    return load_case(golden, request.param)


@functools.partial(jax.jit, static_argnums=0)
def extend(module, params, context, cache):
    """Writes and commits context rows `[T, C * D]` of one row."""
    cache = module.apply({"params": params}, context.T[:, None], cache, method="extend")
    return cache.replace(length=cache.length + len(context))


@functools.partial(jax.jit, static_argnums=0)
def block(module, params, embeddings, cache):
    """Hidden states `[Q, D]` of a block's embeddings `[Q, D]`, and the cache."""
    hidden, cache = module.apply({"params": params}, embeddings.T[:, None], cache)
    return hidden[:, 0].T, cache


def bound(case):
    """The draft's functions, and the pair's parameters."""
    c = case.draft.config
    fns = DraftModel(DFlashDraftModel(c), TargetModel(Transformer(case.target.config)))
    return fns, {"target": case.target.params, "draft": case.draft.params}


@functools.partial(jax.jit, static_argnums=0)
def head(fns, params, hidden):
    return fns.logits(params, hidden.T[:, None])[:, 0].T


@functools.partial(jax.jit, static_argnums=0)
def embed(fns, params, ids):
    return fns.embed(params, ids[None])[:, 0].T


# Parity with the reference


def test_the_config_resolves_like_the_references(case):
    c = case.draft.config
    assert list(c.target_layer_ids) == case.info["resolved_target_layer_ids"]
    assert (c.block_size, c.mask_token_id) == (case.info["block_size"], case.info["mask_token_id"])


def test_two_rounds_on_one_cache_equal_the_references(case):
    module, params = DFlashDraftModel(case.draft.config), case.draft.params
    fns, both = bound(case)
    for j in range(2):
        cache = new_draft_cache(case.draft, 1, SLOTS)
        for prefix in (f"in{j}_", f"in{j}_round2_"):
            arrays = {
                name: case.expected[prefix + name]
                for name in ("features", "block_ids", "noise_embedding", "hidden", "logits")
            }
            ids = arrays["block_ids"]
            assert ids[1:].tolist() == [case.draft.config.mask_token_id] * (len(ids) - 1)
            embedded = embed(fns, both, jnp.asarray(ids, jnp.int32))
            case.close(embedded, arrays["noise_embedding"], "hidden")
            cache = extend(module, params, arrays["features"], cache)
            assert int(cache.length[0]) == case.expected[prefix + "position_ids"][-len(ids)]
            hidden, cache = block(module, params, embedded, cache)
            case.close(hidden, arrays["hidden"], "hidden")
            case.close(head(fns, both, hidden), arrays["logits"], "logits")
        case.close(hidden, case.expected[f"in{j}_round2_uncached_hidden"], "hidden")


def test_the_targets_taps_are_the_references_features(case):
    module = Transformer(case.target.config, case.draft.config.target_layer_ids)
    c = case.target.config
    cache = KVCache.zeros(
        c.num_hidden_layers, 1, c.num_key_value_heads, SLOTS, c.head_dim, jnp.float32
    )
    prompt = case.expected["gen_p0_ids"][: len(case.expected["in0_features"])]
    _, context, _ = jax.jit(module.apply)(
        {"params": case.target.params}, jnp.asarray(prompt[None], jnp.int32), cache
    )
    case.close(context[:, 0].T, case.expected["in0_features"], "hidden")


def check_run(case, name):
    """Runs one stored generation; its tokens and its counts must be the reference's."""
    run, ids = case.info["generation"]["runs"][name], case.expected[f"{name}_ids"].tolist()
    prompt = ids[: len(ids) - run["new_tokens"]]
    out = generate(
        case.target,
        case.draft,
        [prompt],
        max_new_tokens=run["max_new_tokens"],
        stop_token_ids=run["stop_token_ids"] or (),
        block_size=run["block_size"],
    )
    stops = run["stop_token_ids"] or ()
    assert out.tokens[0] == ids[len(prompt) :]
    assert out.finish == ["stop" if ids[-1] in stops else "length"]
    # Near its length limit the reference narrows the block, and may so propose otherwise.
    narrowed = [-1 in row for row in case.expected[f"{name}_blocks"].tolist()]
    whole = narrowed.index(True) if True in narrowed else len(narrowed)
    assert out.rounds[0][:whole] == run["counts"][:whole]
    assert sum(out.rounds[0]) == sum(run["counts"])


def names_of_runs(case, *kinds):
    runs = case.info["generation"]["runs"]
    return [f"{kind}_p{i}" for kind in kinds for i in range(2) if f"{kind}_p{i}" in runs]


def test_a_forward_over_many_blocks_equals_speculators(trained):
    """Their training forward, on the anchors that are real."""
    case, c = trained, trained.draft.config
    fns, params = bound(case)
    run = jax.jit(functools.partial(fns.module.apply, method="blocks"))
    for i in range(2):
        arrays = {
            name: case.expected[f"in{i}_{name}"]
            for name in ("features", "input_ids", "anchors", "anchor_valid", "hidden", "logits")
        }
        anchors, real = arrays["anchors"], np.repeat(arrays["anchor_valid"], c.block_size)
        ids = np.full((len(anchors), c.block_size), c.mask_token_id, np.int32)
        ids[:, 0] = arrays["input_ids"][anchors]
        x = fns.embed(params, jnp.asarray(ids.reshape(1, -1)))
        context = jnp.asarray(arrays["features"].T[:, None])
        positions = jnp.asarray(anchors[None], jnp.int32)
        hidden = run({"params": params["draft"]}, x, context, positions)
        case.close(hidden[:, 0].T[real], arrays["hidden"][real], "hidden")
        logits = fns.logits(params, hidden)[:, 0].T
        case.close(logits[real], arrays["logits"][real], "logits_targets")
        ids = fns.target_ids(params)
        best = np.asarray(logits).argmax(axis=1)
        best = best if ids is None else np.asarray(ids)[best]
        expected = case.expected[f"in{i}_greedy_target_ids"].reshape(-1)
        slot = np.tile(np.arange(c.block_size), len(anchors))
        np.testing.assert_array_equal(best[real & (slot > 0)], expected[real & (slot > 0)])


def test_generation_equals_the_references(decoded):
    for name in names_of_runs(decoded, "gen"):
        check_run(decoded, name)


def test_short_and_stopped_generations_equal_the_references(decoded):
    case = decoded
    kinds = ("gen_max1", "gen_max2", "gen_max5", "gen_stop", "gen_stopfirst")
    names = names_of_runs(case, *kinds)
    assert len(names) == 10
    for name in names:
        check_run(case, name)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "block_size"),
    [
        ("dflash_full", 1),
        ("dflash_full", 2),
        ("dflash_full", 4),
        ("dflash_headdim", 4),
        ("dflash_old_layout", 2),
        ("dflash_default_ids", 2),
        ("dflash_sliding_bidirectional", 4),
        ("dflash_mixed", 4),
        ("dflash_all_causal", 2),
        ("dflash_softcap", 4),
        ("speculators_reduced_vocab", 4),
        ("dflash2", 4),
        ("dflash2_sliding", 2),
    ],
)
def test_smaller_blocks_generate_like_the_references(golden, name, block_size):
    case = load_case(golden, name)
    names = names_of_runs(case, f"gen_bs{block_size}")
    assert len(names) == 2
    for run in names:
        check_run(case, run)


def test_blocks_of_one_are_plain_decoding(golden):
    case = load_case(golden, "dflash_full")
    ids = case.expected["gen_bs1_p0_ids"].tolist()
    prompt = ids[:-48]
    out = generate(case.target, None, [prompt], max_new_tokens=48, stop_token_ids=())
    assert out.tokens[0] == ids[-48:]
    assert out.rounds[0] == [1] * 47


def test_blocks_above_the_trained_size_raise(case):
    size = case.draft.config.block_size
    with pytest.raises(ValueError, match=rf"block_size={size + 1} must be in \[1, {size}\]"):
        generate(case.target, case.draft, [[1]], max_new_tokens=4, block_size=size + 1)


def test_missing_tap_ids_are_not_guessed(golden):
    target = load_target(golden / "targets/qwen3_tied", dtype=jnp.float32)
    with pytest.raises(ValueError, match="target_layer_ids"):
        load_draft(golden / "drafts/dflash_default_ids", target)


# Structure


@pytest.fixture(scope="module")
def small():
    rng = np.random.default_rng(0)
    module, params = DFlashDraftModel(DRAFT), random_params(DRAFT, 1)
    width = len(DRAFT.target_layer_ids) * DRAFT.hidden_size
    context = jnp.asarray(rng.standard_normal((CONTEXT, width)), jnp.float32)
    embeddings = jnp.asarray(rng.standard_normal((6, DRAFT.hidden_size)), jnp.float32)
    return module, params, context, embeddings


def small_cache(dtype=jnp.float32):
    return KVCache.zeros(2, 1, 1, 32, DRAFT.head_dim, dtype)


def test_a_block_leaves_the_length_alone_and_no_trace_in_the_context(small):
    module, params, context, embeddings = small
    cache = extend(module, params, context, small_cache())
    first, after = block(module, params, embeddings, cache)
    assert after.length.tolist() == [CONTEXT]
    for x, y in zip((*cache.k, *cache.v), (*after.k, *after.v)):
        np.testing.assert_array_equal(x[:, :, :CONTEXT], y[:, :, :CONTEXT])
    # Another block in between changes nothing: the next one covers its scratch.
    _, between = block(module, params, -embeddings, after)
    again, _ = block(module, params, embeddings, between)
    np.testing.assert_array_equal(first, again)


def test_every_slot_sees_the_whole_block_and_the_whole_context(small):
    module, params, context, embeddings = small

    @jax.jit
    def sensitivity(embeddings, context):
        def output(embeddings, context, slot):
            cache = module.apply(
                {"params": params}, context.T[:, None], small_cache(), method="extend"
            )
            cache = cache.replace(length=cache.length + CONTEXT)
            hidden, _ = module.apply({"params": params}, embeddings.T[:, None], cache)
            return jnp.sum(hidden[:, 0, slot] * jnp.arange(DRAFT.hidden_size))

        return jax.vmap(jax.grad(output, argnums=(0, 1)), (None, None, 0))(
            embeddings, context, jnp.arange(6)
        )

    of_block, of_context = (np.abs(x).sum(axis=2) for x in sensitivity(embeddings, context))
    assert (of_block > 0).all()
    assert (of_context > 0).all()


@pytest.mark.parametrize("anchors", [[0, 1, 5], [11, 4, 4], [3, 10, 7]])
def test_training_blocks_equal_decoded_ones(small, anchors):
    """A block reads the context strictly before its anchor, and nothing of the other blocks."""
    module, params, context, _ = small
    rng = np.random.default_rng(2)
    size = 4
    x = jnp.asarray(rng.standard_normal((3 * size, DRAFT.hidden_size)), jnp.float32)
    hidden = jax.jit(functools.partial(module.apply, method="blocks"))(
        {"params": params}, x.T[:, None], context.T[:, None], jnp.asarray([anchors], jnp.int32)
    )
    everything = extend(module, params, context, small_cache())
    for a, anchor in enumerate(anchors):
        cache = everything.replace(length=jnp.asarray([anchor], jnp.int32))
        expected, _ = block(module, params, x[a * size : (a + 1) * size], cache)
        ours = hidden[:, 0, a * size : (a + 1) * size].T
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cuts", [(1,) * CONTEXT, (4, 7)])
def test_context_may_come_in_pieces(small, cuts):
    module, params, context, _ = small
    whole, pieces, start = extend(module, params, context, small_cache()), small_cache(), 0
    for width in cuts:
        pieces = extend(module, params, context[start : start + width], pieces)
        start += width
    assert pieces.length.tolist() == whole.length.tolist()
    for x, y in zip((*whole.k, *whole.v), (*pieces.k, *pieces.v)):
        x, y = (z[:, :, :CONTEXT] for z in (x, y))  # behind them is scratch
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_the_drafts_dtype_is_its_own_and_huge_features_stay_finite(small):
    """Features of a float32 target go into a bfloat16 draft, and its states into the target's head."""
    module, _, context, _ = small
    target = TargetModel(Transformer(TARGET, DRAFT.target_layer_ids))
    fns = DraftModel(module, target)
    params = {
        "target": random_params(TARGET, 0),
        "draft": random_params(DRAFT, 1, jnp.bfloat16),
    }

    @jax.jit
    def propose(params, context, cache):
        cache = fns.extend(params, context.T[:, None], cache)
        cache = cache.replace(length=cache.length + CONTEXT)
        return fns.block_logits(params, jnp.asarray([3], jnp.int32), cache, 5)

    logits, cache = propose(params, 1e4 * context, small_cache(jnp.bfloat16))
    assert logits.shape == (TARGET.vocab_size, 1, 4)
    assert logits.dtype == jnp.float32
    assert cache.k[0].dtype == jnp.bfloat16
    assert np.isfinite(logits).all()
