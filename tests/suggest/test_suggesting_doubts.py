"""What fits by its shape but may be another thing is a guess: unlike names, other layouts, counts that restart."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_ckpt_compat._core.tree import Branch
from flax_ckpt_compat._suggest import suggest
from flax_ckpt_compat._trees import state_dict
from tests.random_cases.proposals import case
from tests.support.profiles import examples
from tests.support.suggest_cases import as_stored, proposed
from tests.support.suggest_states import ADAM, array, dense

# Two layers that are the same before and after.
BODY = {"body": dense(4, 16), "mid": dense(16, 8)}
DEEP = {"l1": dense(8, 16), "l2": dense(16, 3)}
UNLIKE = [
    "teacher student", "generator discriminator", "encoder decoder", "image_encoder text_encoder", "mean log_std",
    "reward value", "classifier regressor", "imagenet_head cifar_head", "rnn gru", "LayerNorm_0 BatchNorm_0",
    "embed_ln final_ln", "critic target_critic", "Encoder_0 Decoder_0", "forward_lstm backward_lstm",
    "up_proj down_proj",
    "expert_1 expert_2", "attn mlp", "model_ema model", "actor ema_actor", "Conv_0 Dense_0",
]  # fmt: skip
AKIN = [
    "enc encoder", "q_proj query", "Dense_0 head", "head Dense_0", "Dense_0 fc1", "layers_2 pooler", "attn attention",
    "my_head head", "headLayer head", "MultiHeadDotProductAttention_0 attn", "2 hidden", "gen generator",
    "tok_embed token_embed",
]  # fmt: skip


def guessed(old: Any, new: Any) -> list[str]:
    """The doubts of a suggestion, and what its comments say; it must not be confident."""
    suggestion, _ = proposed(old, new)
    if suggestion is None:
        return []
    assert not suggestion.confident, str(suggestion)
    return [*suggestion.doubts, *(step.reason for step in suggestion.steps if step.keeps)]


def trained(params: Any, tx: Any = ADAM) -> dict[str, Any]:
    """An abstract state of training."""
    return {"step": 0, "params": params, "opt_state": jax.eval_shape(tx.init, params)}


@pytest.mark.slow
@pytest.mark.parametrize("held", [dense(8, 3), DEEP], ids=["layer", "model"])
@pytest.mark.parametrize("names", UNLIKE)
def test_names_that_say_different_things(names: str, held: Any) -> None:
    """Equal shapes make no layer of one name the layer of another, in either direction."""
    for old, new in itertools.permutations(names.split()):
        assert guessed({"params": {**BODY, old: held}}, {"params": {**BODY, new: held}})
        assert guessed(trained({**BODY, old: held}), trained({**BODY, new: held}))
        guessed({old: held, "step": 0}, {new: held, "step": 0})


@pytest.mark.parametrize("names", AKIN)
def test_names_that_may_be_one(names: str) -> None:
    """A layer that is called alike, or had no name but that of its class, is renamed for certain."""
    old, new = names.split()
    suggestion, found = proposed(trained({**BODY, old: dense(8, 3)}), trained({**BODY, new: dense(8, 3)}))
    assert suggestion is not None
    assert suggestion.confident, suggestion.doubts
    assert found[f"params/{new}/kernel"] == f"params/{old}/kernel"
    assert found[f"opt_state/0/mu/{new}/bias"] == f"opt_state/0/mu/{old}/bias"


@pytest.mark.parametrize("names", ["pos cls", "mask_token query_token", "temperature logit_scale"])
def test_single_leaves_of_unlike_names(names: str) -> None:
    """A single leaf of another name is a guess, and so is leaving it to the target."""
    old, new = names.split()
    for shape in ((), (8,), (1, 8), (4, 8)):
        assert guessed({"params": {**BODY, old: array(*shape)}}, {"params": {**BODY, new: array(*shape)}})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"fc": {"weight": array(8, 4), "bias": array(8)}}, {"fc": {"kernel": array(4, 8), "bias": array(8)}}),
        ({"conv": {"kernel": array(3, 3, 4, 8)}}, {"conv": {"kernel": array(8, 4, 3, 3)}}),
        ({"attn": {"kernel": array(8, 8)}}, {"attn": {"kernel": array(8, 2, 4)}}),
        ({"attn": {"query": dense(8, 8)}}, {"self": {"query": {"kernel": array(8, 2, 4), "bias": array(2, 4)}}}),
        ({"wte": {"weight": array(30, 4)}}, {"wte": {"weight": array(40, 4)}}),
        ({"tokens": {"table": array(30, 4)}}, {"tokens": {"table": array(40, 4)}}),
        ({"tokens": {"table": array(30, 4)}}, {"vocab": {"table": array(40, 4)}}),
        ({"pos": array(1, 196, 8)}, {"pos": array(1, 256, 8)}),
        ({"lm_head": dense(8, 30)}, {"lm_head": dense(8, 40)}),
        ({"stem": {"kernel": array(3, 3, 1, 8)}}, {"stem": {"kernel": array(3, 3, 3, 8)}}),
        ({"norm": {"scale": array(8), "gain": array(3, 8)}}, {"norm": {"scale": array(8), "shift": array(5, 8)}}),
    ],
    ids=["torch", "conv", "heads", "heads elsewhere", "vocabulary", "table", "other table", "positions", "lm head",
         "channels", "part of a layer"],
)  # fmt: skip
def test_weights_in_another_layout_or_size(old: Any, new: Any) -> None:
    """Trained weights are not left behind for certain where the checkpoint has them transposed, reshaped or shorter."""
    assert guessed({"params": {**BODY, **old}}, {"params": {**BODY, **new}})


def test_weights_of_flax_optim_are_no_state_of_an_optimizer() -> None:
    """What lies below ``optimizer/target`` are parameters: those that are left behind are a doubt as anywhere."""
    old = {"optimizer": {"target": {**BODY, "fc": {"weight": array(7, 5)}}, "state": {"step": 0}}}
    doubts = guessed(old, {"params": {**BODY, "dense": {"kernel": array(5, 7)}}})
    assert any("optimizer/target/fc/weight is not used" in doubt for doubt in doubts), doubts


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(2, 7), min_size=2, max_size=4), st.randoms(use_true_random=False), st.booleans())
def test_as_many_elements_are_a_doubt(shape: list[int], random: Any, renamed: bool) -> None:
    """A stored array that is permuted or reshaped in the target is never given up for certain."""
    other = random.sample(shape, len(shape))
    if random.random() < 0.5:
        other = [math.prod(other[:2]), *other[2:]]
    name = "other" if renamed else "thing"
    old = {"params": {**BODY, "thing": {"kernel": array(*shape)}}}
    new = {"params": {**BODY, name: {"kernel": array(*other)}}}
    if old != new:
        assert guessed(old, new)


def test_a_number_and_an_array_of_one_element_are_a_doubt() -> None:
    """A stored scalar is not given up for certain beside a new array of one element."""
    assert any(
        "is not used" in doubt or "stored and unused: params/scale" in doubt
        for doubt in guessed({"params": {**BODY, "scale": array()}}, {"params": {**BODY, "temperature": array(1)}})
    )


@pytest.mark.parametrize("name", ["head", "classifier", "logits", "fc_out", "Dense_1"])
def test_a_new_head_is_no_doubt(name: str) -> None:
    """The last layer, by its name or Flax's number, may have another number of classes."""
    body = {"Dense_0": dense(4, 16)}
    suggestion, found = proposed({"params": {**body, name: dense(16, 10)}}, {"params": {**body, name: dense(16, 7)}})
    assert suggestion is not None
    assert not suggestion.doubts
    assert found[f"params/{name}/kernel"] is None


@pytest.mark.parametrize(
    "tx",
    [
        optax.adam(optax.linear_schedule(0.0, 1e-3, 10)),
        optax.inject_hyperparams(optax.adam)(1e-3),
        optax.MultiSteps(optax.adam(1e-3), 2),
    ],
    ids=["schedule", "hyperparameters", "several steps"],
)
def test_a_schedule_that_begins_anew_is_a_doubt(tx: Any) -> None:
    """Where moments are taken but a count of steps is not, that is said and is not a confident suggestion."""
    assert any("begin anew" in doubt for doubt in guessed(trained(BODY), trained(BODY, tx)))


def test_a_pattern_matches_nothing_but_what_it_is_for() -> None:
    """Names of a tuple's items, which occur in lists and chains too, are renamed at the root alone."""
    params = {"blocks": [dense(3, 5), dense(5, 6), dense(6, 7)], "out": dense(7, 2)}
    opt_state = jax.eval_shape(ADAM.init, params)
    suggestion, found = proposed((params, opt_state), {"params": params, "opt_state": opt_state})
    assert suggestion is not None
    assert sorted(rule.source for rule in suggestion.rules) == [
        "rules.rename('^0', 'params')",
        "rules.rename('^1', 'opt_state')",
    ]
    for path, source in found.items():
        top, _, rest = path.partition("/")
        assert source == f"{['params', 'opt_state'].index(top)}/{rest}"


def test_a_second_optimizer_is_a_doubt() -> None:
    """Moments that one optimizer had are not given to two of them for certain."""
    new = {**trained(BODY), "opt_state2": jax.eval_shape(ADAM.init, BODY)}
    assert any("would both come from opt_state" in doubt for doubt in guessed(trained(BODY), new))


def test_moments_are_no_parameters() -> None:
    """An optimizer's state that the target lacks is not renamed to what has the shapes of its moments."""
    target = {"net": {"params": BODY}, "slow": BODY, "step": 0}
    suggestion = suggest(as_stored(trained(BODY)), state_dict.describe(target))
    assert suggestion is not None
    assert "rename('opt_state'" not in str(suggestion)


def test_rules_are_those_that_are_not_comments() -> None:
    """What prints as a comment is for the user to decide: the rules that programs pass leave it missing."""
    suggestion, _ = proposed(trained(BODY), trained(BODY, optax.sgd(0.1, 0.9)))
    assert suggestion is not None and "# rules.from_target('opt_state')" in str(suggestion)
    assert suggestion.rules == []


def shuffled(node: Any, random: Any) -> Any:
    """A tree with the children of every branch in another order."""
    if not isinstance(node, Branch):
        return node
    names = random.sample(list(node.children), len(node.children))
    return Branch({name: shuffled(node.children[name], random) for name in names}, node.container, node.int_keys)


@pytest.mark.slow
@settings(max_examples=examples(25, 8), deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_order_of_names_does_not_matter(random: Any) -> None:
    """Msgpack keeps the order of definition, Orbax's format sorts: both get the same suggestion."""
    stored, target = case(random.randrange(10**6)).trees
    assert suggest(stored, target) == suggest(shuffled(stored, random), shuffled(target, random))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(nnx, "to_pure_dict"), reason="this Flax has no nnx.to_pure_dict")
@settings(max_examples=10, deadline=None)
@given(st.randoms(use_true_random=False))
def test_linen_to_nnx_in_any_order(random: Any) -> None:
    """A linen state gives a model and an optimizer of NNX their leaves, whatever the order of its names."""

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.hidden, self.out = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 10, rngs=rngs)

    model = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    params = {"Dense_0": dense(64, 64), "Dense_1": dense(64, 10)}
    moments = {"hidden": dense(64, 64), "out": dense(64, 10)}
    new = {"model": nnx.state(model), "optimizer": {"step": 0, "opt_state": jax.eval_shape(ADAM.init, moments)}}
    plain = {**new, "model": nnx.to_pure_dict(new["model"])}
    target = state_dict.describe(plain)
    suggestion = suggest(shuffled(as_stored(trained(params)), random), target)
    assert suggestion is not None
    assert "rules.move('params', 'model')" in str(suggestion)
    assert not suggestion.remaining
