"""`td_steps` of muzero_targets as a tensor: a number for each row, or for each row and unroll step."""

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from test_returns import assert_same, direct, lazily_negated, window_data, windows, without_kernels  # noqa: F401
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from trajectories import muzero_row

import gradscale_ext as gs

NUMBERS = {"num_unroll_steps": 5, "discount": 0.9}
MODULES = pytest.mark.parametrize("module", [gs, gs.reference])
SHAPES = pytest.mark.parametrize("shape", [(9,), (9, 6)])


def horizons(shape, seed=0):
    """Numbers from below 1 to beyond the windows, the extremes of int64 among them."""
    td_steps = torch.randint(-2, 12, shape, generator=torch.Generator().manual_seed(seed))
    extremes = torch.tensor([-(2**63), 2**63 - 1, 2**62, 0])
    td_steps.view(-1)[:4] = extremes
    return td_steps


def by_definition(data, td_steps, to_play=None, horizon=0):
    rows = []
    for b in range(len(td_steps)):
        r, nu, length, over = (data[name][b].numpy() for name in ("rewards", "root_values", "lengths", "terminated"))
        players = None if to_play is None else to_play[b].numpy()
        rows.append(muzero_row(r, nu, int(length), bool(over), 5, td_steps[b].numpy(), 0.9, players, horizon))
    return tuple(torch.from_numpy(np.stack(field)) for field in zip(*rows, strict=True))


def transposed(arguments):
    return {
        name: value.T if isinstance(value, torch.Tensor) and value.dim() == 2 else value
        for name, value in arguments.items()
    }


@MODULES
@SHAPES
@pytest.mark.parametrize("kind", ["one player", "two players", "value prefix"])
@pytest.mark.any_version
def test_against_the_definition(kind, shape, module):
    for seed in range(3):
        data = window_data() | {"root_reward": None}
        data["to_play"] = torch.randint(2, (9, 9)) if kind == "two players" else None
        prefix = {"reward": "value_prefix", "prefix_horizon": 2} if kind == "value prefix" else {}
        td_steps = horizons(shape, seed)
        expected = by_definition(data, td_steps, data["to_play"], 2 if prefix else 0)
        arguments = data | NUMBERS | prefix | {"td_steps": td_steps}
        assert_same(module.muzero_targets(**arguments), expected, rtol=1e-12, atol=1e-12)
        results = module.muzero_targets(**transposed(arguments), batch_first=False)
        assert_same([result.T for result in results], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.any_version
def test_rows_are_those_of_a_call_with_their_number():
    """Bit for bit, on every instruction set that a call takes."""
    data = {name: value.float() if value.is_floating_point() else value for name, value in window_data().items()}
    for n in (1, 2, 3, 8, 100):
        expected = gs.muzero_targets(**data, **NUMBERS, td_steps=n)
        for shape in ((9,), (9, 6)):
            results = gs.muzero_targets(**data, **NUMBERS, td_steps=torch.full(shape, n))
            assert_same(results, expected, rtol=0, atol=0)


@pytest.mark.any_version
def test_strides_and_lazy_negation_go_straight_to_cpp(direct):  # noqa: F811
    data, td_steps = window_data(), horizons((9, 6))
    for values in (td_steps, td_steps[:, 0]):
        expected = gs.muzero_targets(**data, **NUMBERS, td_steps=values.contiguous())
        wide = torch.stack([values, values + 1], -1)[..., 0]
        backwards = values.flip(0).contiguous().flip(0)
        for given in (values, wide, backwards, values.T.contiguous().T if values.dim() == 2 else values):
            assert_same(gs.muzero_targets(**data, **NUMBERS, td_steps=given), expected, rtol=0, atol=0)
        kept = values.clamp(-5, 20)
        results = gs.muzero_targets(**data, **NUMBERS, td_steps=lazily_negated(kept))
        assert_same(results, gs.muzero_targets(**data, **NUMBERS, td_steps=kept), rtol=0, atol=0)
    expanded = torch.tensor([3]).expand(9, 6)
    expected = gs.muzero_targets(**data, **NUMBERS, td_steps=3)
    assert_same(gs.muzero_targets(**data, **NUMBERS, td_steps=expanded), expected, rtol=0, atol=0)


@MODULES
@pytest.mark.any_version
def test_entries_that_no_target_reads(module):
    data, td_steps = window_data() | {"to_play": None}, torch.ones(9, dtype=torch.int64)
    expected = module.muzero_targets(**data, **NUMBERS, td_steps=td_steps)
    spoilt = data["root_values"].clone()
    spoilt[:, 0] = torch.nan  # with one step, no target bootstraps from the root
    spoilt[data["lengths"] == 0, 0] = 0
    known = data["lengths"] > 0
    results = module.muzero_targets(**data | {"root_values": spoilt}, **NUMBERS, td_steps=td_steps)
    assert_same([field[known] for field in results], [field[known] for field in expected], rtol=0, atol=0)


@pytest.mark.any_version
def test_empty_windows():
    for rows, moves in ((0, 3), (2, 0)):
        rewards, values = torch.ones(rows, moves), torch.ones(rows, moves + 1)
        for shape in ((rows,), (rows, 3)):
            td_steps = torch.full(shape, 2)
            results = windows(rewards=rewards, root_values=values, td_steps=td_steps)
            assert_same(results, windows(rewards=rewards, root_values=values, td_steps=2), rtol=0, atol=0)


# ---- Contexts -------------------------------------------------------------------------------------------------------


@pytest.mark.any_version
def test_vmap():
    data = window_data()
    rows, entries = (torch.stack([horizons(shape, seed) for seed in range(3)]) for shape in ((9,), (9, 6)))
    for stacked, dim in ((rows, 0), (rows.movedim(0, 1), 1), (entries, 0), (entries.movedim(0, 2), 2)):

        def targets(td_steps):
            return gs.muzero_targets(**data, **NUMBERS, td_steps=td_steps)

        def by_step(td_steps):
            td_steps = td_steps if td_steps.dim() == 1 else td_steps.T
            return gs.muzero_targets(**transposed(data), **NUMBERS, td_steps=td_steps, batch_first=False)

        results = torch.func.vmap(targets, dim)(stacked)
        results_by_step = torch.func.vmap(by_step, dim)(stacked)
        for i in range(3):
            expected = targets(stacked.select(dim, i))
            assert_same([field[i] for field in results], expected, rtol=0, atol=0)
            assert_same([field[i].T for field in results_by_step], expected, rtol=0, atol=0)
    mapped = torch.func.vmap(lambda r: gs.muzero_targets(**data | {"rewards": r}, **NUMBERS, td_steps=rows[0]))
    results = mapped(torch.stack([data["rewards"], -data["rewards"]]))
    expected = gs.muzero_targets(**data | {"rewards": -data["rewards"]}, **NUMBERS, td_steps=rows[0])
    assert_same([field[1] for field in results], expected, rtol=0, atol=0)


@pytest.mark.compiled
@SHAPES
def test_compiled_calls_do_not_recompile(shape):
    data = window_data()
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def targets(td_steps):
        return tuple(gs.muzero_targets(**data, **NUMBERS, td_steps=td_steps))

    torch._dynamo.reset()
    compiled = torch.compile(targets, fullgraph=True, backend=count)
    for seed in range(4):
        td_steps = horizons(shape, seed)
        assert_same(compiled(td_steps), targets(td_steps), rtol=1e-12, atol=1e-12)
    assert count.frame_count == 1


@pytest.mark.compiled
def test_other_contexts():
    data, td_steps = window_data(), horizons((9, 6))

    def targets(td_steps):
        return tuple(gs.muzero_targets(**data, **NUMBERS, td_steps=td_steps))

    expected = targets(td_steps)
    for context in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)):
        with context():
            assert_same(targets(td_steps), expected, rtol=0, atol=0)
    with torch.inference_mode():
        made = td_steps.clone()
    assert_same(targets(made), expected, rtol=0, atol=0)
    module = torch.nn.Module()
    module.forward = targets
    assert_same(torch.export.export(module, (td_steps,)).module()(td_steps), expected, rtol=0, atol=0)
    assert_same(make_fx(targets)(td_steps)(td_steps), expected, rtol=0, atol=0)
    with FakeTensorMode() as mode:  # reading a value would raise
        window = {"rewards": torch.ones(2, 3), "root_values": torch.ones(2, 4)}
        assert windows(**window, td_steps=mode.from_tensor(torch.ones(2, dtype=torch.int64))).values.shape == (2, 3)


@SHAPES
def test_a_device_without_kernels(shape, without_kernels):  # noqa: F811
    data, td_steps = window_data(), horizons(shape)
    results = gs.muzero_targets(**data, **NUMBERS, td_steps=td_steps)
    assert_same(results, gs.reference.muzero_targets(**data, **NUMBERS, td_steps=td_steps), rtol=0, atol=0)


# ---- Errors ---------------------------------------------------------------------------------------------------------


@MODULES
@pytest.mark.parametrize(
    ("td_steps", "error", "message"),
    [
        (torch.tensor([1.0, 2.0]), TypeError, r"its dtype is torch.float32; write td_steps.long\(\)$"),
        (torch.tensor([1, 2]).int(), TypeError, r"its dtype is torch.int32; write td_steps.long\(\)$"),
        (torch.tensor([True, True]), TypeError, r"its dtype is torch.bool; write td_steps.long\(\)$"),
        (torch.ones(2, requires_grad=True), TypeError, r"write td_steps.long\(\)$"),
        ([1, 2], TypeError, "an integer of at least 1, or an int64 tensor, but it is of type list"),
        (np.array([1, 2]), TypeError, "of type ndarray.*torch.as_tensor"),
        (None, TypeError, "an integer of at least 1, or an int64 tensor, but it is of type NoneType"),
        (torch.tensor(3), ValueError, r"shape \[2\] or \[2, 3\], but its shape is \[\]; write td_steps.expand\(2\)$"),
        (torch.ones(3).long(), ValueError, r"shape \[2\] or \[2, 3\], but its shape is \[3\]$"),
        (torch.ones(2, 1).long(), ValueError, r"its shape is \[2, 1\]; write td_steps.squeeze\(-1\)$"),
        (torch.ones(2, 2).long(), ValueError, r"shape \[2\] or \[2, 3\], but its shape is \[2, 2\]$"),
        (torch.ones(3, 2).long(), ValueError, r"its shape is \[3, 2\]; .*write td_steps\.T$"),
        (torch.ones(2, 3, 1).long(), ValueError, r"its shape is \[2, 3, 1\]$"),
        (torch.ones(2, device="meta").long(), ValueError, "must be on the device of rewards, cpu, but it is on meta"),
    ],
)
@pytest.mark.any_version
def test_errors(td_steps, error, message, module):
    with pytest.raises(error, match=f"^muzero_targets: td_steps .*{message}"):
        windows(module, td_steps=td_steps)


@MODULES
@pytest.mark.any_version
def test_a_third_player_is_refused_only_where_a_target_reads_it(module):
    """The last state that a row reads depends on its numbers of steps."""
    players = torch.tensor([[0, 1, 0, 1], [0, 1, 0, 2]])
    for check in (False, True):
        for td_steps in (torch.tensor([3, 2]), torch.tensor([[1, 1], [3, 1]]), torch.tensor([[1, 1], [1, 2]])):
            with pytest.raises(ValueError, match=r"^muzero_targets: to_play must have .* row 1 has"):
                windows(module, to_play=players, td_steps=td_steps, num_unroll_steps=1, check=check)
        unread = windows(module, to_play=players, td_steps=torch.tensor([3, 1]), num_unroll_steps=1, check=check)
        known = windows(module, to_play=players.clamp(max=1), td_steps=torch.tensor([3, 1]), num_unroll_steps=1)
        assert_same(unread, known, rtol=0, atol=0)


@MODULES
@pytest.mark.any_version
def test_check_names_the_entry_that_makes_a_target_nan(module):
    nan = torch.nan
    values = torch.tensor([[0, 1, 2, 3], [0, nan, nan, 0]])  # targets of row 1 read states 2 and 3, not 1
    td_steps = torch.tensor([[1, 1, 1], [2, 2, 1]])
    message = "the value target of row 1 at step 0 is NaN, because root_values has NaN at index 2 of the row"
    with pytest.raises(ValueError, match=f"^muzero_targets: {message}"):
        windows(module, root_values=values, td_steps=td_steps, check=True)
    assert windows(module, root_values=values, td_steps=torch.tensor([1, 3]), check=True).values.isfinite().all()
