"""`gs.unroll`: its outputs, the gradients of hidden states, and errors."""

from __future__ import annotations

import pytest
import torch

import gradscale_ext as gs


def _sums(hidden_scale, actions):
    """Gradients of the root state and of w for s' = w s with unit losses on the root and five recurrent states."""
    root = torch.ones(1, dtype=torch.float64, requires_grad=True)
    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    outputs = gs.unroll(
        lambda observation: ({"value": observation}, observation),
        lambda hidden, action: ({"value": w * hidden}, w * hidden),
        root,
        actions,
        hidden_scale=hidden_scale,
    )
    sum(entry.sum() for entry in outputs["value"]).backward()
    return root.grad.item(), w.grad.item()


@pytest.mark.parametrize("actions", [torch.zeros(1, 5), list(torch.zeros(5, 1)), torch.zeros(1, 5, 2)])
def test_scales_only_the_state_that_is_passed_on(actions):
    assert _sums(1.0, actions) == (6, 15)
    root, w = _sums(0.5, actions)
    assert root == pytest.approx(2.9375, abs=1e-12)
    assert w == pytest.approx(8.0625, abs=1e-12)


def test_heads_without_a_root():
    outputs = gs.unroll(
        lambda observation: ({"value": observation}, observation),
        lambda hidden, action: ({"value": hidden, "reward": action}, hidden),
        torch.zeros(2),
        torch.ones(2, 3),
    )
    assert {name: len(entries) for name, entries in outputs.items()} == {"value": 4, "reward": 3}


def test_no_actions():
    outputs = gs.unroll(lambda x: ({"value": x}, x), lambda h, a: ({"value": h}, h), torch.zeros(2), torch.ones(2, 0))
    assert len(outputs["value"]) == 1


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"recurrent step 1 returned the heads \['reward'\]"):
        gs.unroll(lambda x: ({"value": x}, x), lambda h, a: ({"reward": h}, h), torch.zeros(2), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"\[B, K, \.\.\.\], but it has \(3,\)"):
        gs.unroll(lambda x: ({"value": x}, x), lambda h, a: ({"value": h}, h), torch.zeros(2), torch.ones(3))


def _value(hidden):
    return {"value": hidden}, hidden


@pytest.mark.parametrize("steps", [3, 4])
def test_actions_that_are_not_tensors_are_rejected(steps):
    """Iteration over a NumPy array [B, K] would yield samples instead of steps."""
    array = torch.ones(3, steps).numpy()
    for actions, words in (
        (array, r"of type ndarray; convert actions: torch\.as_tensor\(actions\)"),
        (
            array.tolist(),
            r"actions\[0\] is of type list; write \[torch\.as_tensor\(action\) for action in actions\] for an entry",
        ),
        (list(array), r"actions\[0\] is of type ndarray; write \[torch\.as_tensor\(action\)"),
        (
            [1, 2, 3],
            r"actions\[0\] is of type int; write torch\.as_tensor\(actions\)\[None\] for the steps of a single",
        ),
        (iter(torch.ones(3, 2)), r"make actions a list: list\(actions\)"),
        ("left", "of type str"),
        (None, "of type NoneType"),
    ):
        with pytest.raises(TypeError, match=words):
            gs.unroll(_value, lambda h, a: _value(h + a), torch.zeros(3), actions)


def test_actions_of_a_sequence_must_have_one_batch_size():
    recurrent = lambda h, a: _value(h)
    for actions, words in (
        ([torch.ones(2), torch.ones(3)], r"actions\[1\] has shape \(3,\) and actions\[0\] has shape \(2,\)"),
        ([torch.ones(()), torch.ones(())], r"actions\[0\] has no dimensions; write torch\.stack\(actions\)\[None\]"),
    ):
        with pytest.raises(ValueError, match=words):
            gs.unroll(_value, recurrent, torch.zeros(2), actions)
    assert len(gs.unroll(_value, recurrent, torch.zeros(2), (torch.ones(2), torch.ones(2, 1)))["value"]) == 3


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ((torch.ones(2), torch.ones(2), torch.ones(2)), r"returned tuple of 3 \(Tensor, Tensor, Tensor\)"),
        ((torch.ones(2), {"value": torch.ones(2)}), r"returned tuple of 2 \(Tensor, dict\)"),
        ({"value": torch.ones(2)}, "returned dict"),
        (torch.ones(2, 2), "returned Tensor"),
        (None, "returned nothing"),
    ],
)
def test_functions_with_wrong_results(returned, words):
    right = ({"value": torch.ones(2)}, torch.ones(2))
    for initial, recurrent, name in ((returned, right, r"initial\(observation\)"), (right, returned, "recurrent")):
        with pytest.raises(TypeError, match=f'{name}.*{words}.*"policy": policy}}, hidden'):
            gs.unroll(lambda x, r=initial: r, lambda h, a, r=recurrent: r, torch.zeros(2), torch.ones(2, 3))


@pytest.mark.parametrize("states_type", [tuple, list, lambda pair: dict(zip("hc", pair, strict=True))])
def test_states_of_an_lstm(states_type):
    """h and c are each scaled, only on the way to the next step."""
    torch.manual_seed(0)
    cell = torch.nn.LSTMCell(2, 3).double()
    first = [torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    actions = torch.randn(4, 3, 2, dtype=torch.float64)

    def recurrent(state, action):
        h, c = cell(action, tuple(state.values() if isinstance(state, dict) else state))
        return {"value": h.sum(1)}, states_type((h, c))

    outputs = gs.unroll(lambda _: ({"value": first[0].sum(1)}, states_type(first)), recurrent, None, actions)
    actual = torch.autograd.grad(sum(v.sum() for v in outputs["value"]), [*first, *cell.parameters()])

    (h, c), total = first, first[0].sum()
    for action in actions.unbind(1):
        h, c = cell(action, (h, c))
        total = total + h.sum()
        h, c = (0.5 * state + 0.5 * state.detach() for state in (h, c))
    for a, b in zip(actual, torch.autograd.grad(total, [*first, *cell.parameters()]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_hidden_scale_is_checked_before_anything_runs():
    def refuse(*_):
        raise AssertionError("a function was called")

    for scale, error in ((float("nan"), ValueError), (float("inf"), ValueError), ("0.5", TypeError), (True, TypeError)):
        with pytest.raises(error, match="hidden_scale"):
            gs.unroll(refuse, refuse, None, torch.ones(2, 0), hidden_scale=scale)
    root = torch.ones(1, dtype=torch.float64, requires_grad=True)
    outputs = gs.unroll(
        _value, lambda h, a: _value(2 * h), root, torch.zeros(1, 2), hidden_scale=torch.tensor(0.25).double()
    )
    assert torch.autograd.grad(outputs["value"][-1], root)[0].item() == 1.0


def test_outputs_may_be_any_mapping():
    class Items:
        """Iteration does not yield the keys, as with a TensorDict."""

        def __init__(self, **entries):
            self.entries = entries

        def __iter__(self):
            return iter([torch.ones(1), torch.ones(1)])

        def keys(self):
            return self.entries.keys()

        def items(self):
            return self.entries.items()

    outputs = gs.unroll(
        lambda x: (Items(value=x), x), lambda h, a: (Items(value=h, reward=a), h), torch.zeros(2), torch.ones(2, 3)
    )
    assert {name: len(entries) for name, entries in outputs.items()} == {"value": 4, "reward": 3}


@pytest.mark.parametrize(
    ("hidden", "scale", "error", "words"),
    [
        ({"h": torch.ones(2), "c": torch.ones(2).long()}, 0.5, TypeError, r"2: hidden\['c'\] must be .*torch\.int64"),
        ((torch.ones(2), None), 0.5, TypeError, r"2: hidden\[1\] must be a tensor.* of type NoneType"),
        (None, 0.5, TypeError, "2: hidden must be a tensor, or a structure of tensors .* of type NoneType"),
        (torch.ones(2), torch.ones(3), ValueError, r"1: hidden_scale must broadcast to the shape of hidden, \[2\]"),
        ([torch.ones(2)], torch.ones(2, requires_grad=True), ValueError, "1: hidden_scale requires grad"),
        (torch.ones(2), torch.ones(2) > 0, TypeError, "1: hidden_scale must be real.* torch.bool"),
    ],
)
def test_errors_of_hidden_states_name_the_step_and_the_entry(hidden, scale, error, words):
    states = iter([torch.ones(2), hidden])

    def recurrent(_, action):
        return {"value": action}, next(states)

    with pytest.raises(error, match=f"^unroll: recurrent step {words}"):
        gs.unroll(lambda x: ({"value": x}, x), recurrent, torch.ones(2), torch.ones(2, 3), hidden_scale=scale)


class Hidden(dict):
    def __init__(self, h=None, **others):
        super().__init__(h=h, **others)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_hidden_states_keep_their_type(compiled):
    def recurrent(hidden, action):
        assert type(hidden) is Hidden
        return {"value": hidden["h"] + hidden["c"]}, Hidden(2 * hidden["h"], c=3 * hidden["c"])

    def run(x, actions):
        outputs = gs.unroll(lambda x: ({"value": x}, Hidden(x, c=x)), recurrent, x, actions)
        return sum(value.sum() for value in outputs["value"])

    torch._dynamo.reset()
    run = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
    x = torch.ones(2, requires_grad=True)
    run(x, torch.ones(2, 3)).backward()
    assert x.grad.tolist() == [1 + 2 + 5 / 2 + 13 / 4] * 2
