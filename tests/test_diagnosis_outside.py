"""Values that leave PyTorch and may come back: a tensor of the same shape is made from an array or a list later."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import io
import itertools
import json
import re
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import gradscale_ext as gs
from gradscale_ext.diagnosis.calls import FROM_OUTSIDE_UNSEEN
from gradscale_ext.diagnosis.tracer import GradientTracer

_numbers = torch.Generator().manual_seed(0)
X, Y = torch.randn(2, 16, 6, generator=_numbers)
TARGETS, REWARDS = torch.randn(2, 16, generator=_numbers)
FILE = Path(__file__)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def line_of(mark):
    """The number of the line of this file that ends with "# <- {mark}"."""
    lines = FILE.read_text().splitlines()
    (line,) = [number for number, content in enumerate(lines, 1) if content.endswith(f"# <- {mark}")]
    return line


def recurrent(dtype=torch.float32):
    return nn.ModuleDict({"cell": nn.GRUCell(6, 6, dtype=dtype), "last": nn.Linear(6, 1, dtype=dtype)})


def unrolled(model, between):
    """A loss of three steps; `between` is applied to the hidden state between two of them."""
    dtype = model["last"].weight.dtype
    hidden, loss = torch.zeros(16, 6, dtype=dtype), 0.0
    for _ in range(3):
        hidden = model["cell"](X.to(dtype), between(hidden))
        loss = loss + model["last"](hidden).square().mean()
    return loss


def diagnose(step, model):
    with GradientTracer() as tracer:
        loss = step(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    diagnosis = gs.diagnose_gradients(loss, model, optimizer, tracer=tracer)
    assert str(diagnosis)
    return diagnosis


def note(diagnosis):
    """The only finding, which must be a note on the loss."""
    (finding,) = diagnosis.findings
    assert (finding.parameter, finding.is_note) == ("loss", True)
    return finding


# ---- Each way out of PyTorch, and back ------------------------------------------------------------------------------


def by_detach(h):
    return h.detach()  # <- detach


def by_numpy(h):
    return torch.from_numpy(h.detach().numpy())  # <- numpy


def by_forced_numpy(h):
    return torch.from_numpy(h.numpy(force=True))  # <- force


def by_copied_array(h):
    return torch.from_numpy(h.detach().cpu().numpy().copy())  # <- copy


def by_asarray(h):
    return torch.as_tensor(np.asarray(h.detach()))  # <- asarray


def by_array(h):
    return torch.tensor(np.array(h.detach()))  # <- array


def by_ufunc(h):
    return np.positive(h.detach())  # <- ufunc


def by_float64(h):
    return torch.from_numpy(h.detach().numpy().astype(np.float64)).float()  # <- float64


def by_two_statements(h):
    array = h.detach().numpy()  # <- statements
    later = array[:, ::-1].copy()
    return torch.from_numpy(later[:, ::-1].copy())


def by_reversed_rows(h):
    return torch.from_numpy(h.detach().numpy()[::-1].copy())  # <- rows


def by_scaled_array(h):
    return torch.from_numpy(h.detach().numpy() * 0.5)  # <- scaled


def by_negated_array(h):
    return torch.from_numpy(1 - 2 * h.detach().numpy())  # <- negated


def by_numpy_tanh(h):
    array = np.tanh(h.detach().numpy())  # <- tanh
    return torch.tensor(array)


def by_numpy_relu(h):
    return torch.from_numpy(np.maximum(h.detach().numpy(), 0))  # <- relu


def by_changed_array(h):
    array = h.numpy(force=True).copy()  # <- changed
    array *= 2
    return torch.from_numpy(array)


def by_shared_memory(h):
    array = h.detach().numpy()  # <- shared
    array[:] = np.sort(array, axis=0) ** 2
    return torch.from_numpy(array)


def by_list(h):
    return torch.tensor(h.tolist())  # <- tolist


def by_nested_list(h):
    rows = h.tolist()  # <- nested
    return torch.as_tensor([[2 * number for number in row] for row in rows])


def by_new_tensor(h):
    return h.new_tensor(h.tolist())  # <- new_tensor


def by_json(h):
    return torch.tensor(json.loads(json.dumps(h.tolist())))  # <- json


def by_dlpack(h):
    return torch.from_dlpack(h.detach())  # <- dlpack


def by_numpy_dlpack(h):
    return torch.from_numpy(np.from_dlpack(h.detach()).copy())  # <- numpy dlpack


def by_storage(h):
    return torch.empty(0).set_(h.detach().untyped_storage(), 0, h.shape)  # <- storage


def by_address(h):
    address = ctypes.cast(h.data_ptr(), ctypes.POINTER(ctypes.c_float))  # <- address
    return torch.from_numpy(np.ctypeslib.as_array(address, (16, 6))) + 0  # used while h owns the memory


def by_data(h):
    return h.data  # <- data


def by_copy(h):
    return copy.copy(h.detach())  # <- copy.copy


def by_deepcopy(h):
    return copy.deepcopy(h.detach())  # <- deepcopy


WAYS = {
    by_detach: "detach",
    by_numpy: "numpy",
    by_forced_numpy: "force",
    by_copied_array: "copy",
    by_asarray: "asarray",
    by_array: "array",
    by_ufunc: "ufunc",
    by_float64: "float64",
    by_two_statements: "statements",
    by_reversed_rows: "rows",
    by_scaled_array: "scaled",
    by_negated_array: "negated",
    by_numpy_tanh: "tanh",
    by_numpy_relu: "relu",
    by_changed_array: "changed",
    by_shared_memory: "shared",
    by_list: "tolist",
    by_nested_list: "nested",
    by_new_tensor: "new_tensor",
    by_json: "json",
    by_dlpack: "dlpack",
    by_numpy_dlpack: "numpy dlpack",
    by_storage: "storage",
    by_address: "address",
    by_data: "data",
    by_copy: "copy.copy",
    by_deepcopy: "deepcopy",
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.filterwarnings("ignore")
def test_a_hidden_state_that_leaves_pytorch_between_two_steps_is_one_note(way):
    """The note is the same as for `detach()`, and names the line of the call."""
    model = recurrent()
    finding = note(diagnose(lambda m: unrolled(m, way), model))
    assert finding.code == "detached"
    assert finding.location.endswith(f"{FILE.name}:{line_of(WAYS[way])}")
    assert finding.source.endswith(f"# <- {WAYS[way]}")
    listed = "cell.weight_ih, cell.weight_hh, ... and 2 more"
    assert finding.cause.endswith(f" sends no gradient to {listed}; other paths do")
    assert "truncated backpropagation" in finding.remedy


DTYPES = {
    torch.float64: [by_copied_array, by_numpy_tanh, by_list, by_numpy_dlpack],
    torch.float16: [by_copied_array, by_numpy_tanh, by_list, by_numpy_dlpack],
    torch.bfloat16: [by_list, by_nested_list],
}


@pytest.mark.parametrize(("dtype", "way"), [(dtype, way) for dtype in DTYPES for way in DTYPES[dtype]])
def test_other_dtypes(dtype, way):
    """The numbers may come back in another type."""
    model = recurrent(torch.float64 if dtype == torch.float64 else torch.float32)
    weight = model["last"].weight
    finding = note(diagnose(lambda m: unrolled(m, lambda h: way(h.to(dtype)).to(weight)), model))
    assert finding.location.endswith(f"{FILE.name}:{line_of(WAYS[way])}")


def test_a_tuple_of_states_is_one_note():
    model = nn.ModuleDict({"cell": nn.LSTMCell(6, 6), "last": nn.Linear(6, 1)})

    def as_arrays(state):
        return [part.detach().numpy().copy() for part in state]  # <- states

    def step(m):
        state, loss = None, 0.0
        for _ in range(3):
            state = m["cell"](X, state and tuple(map(torch.from_numpy, as_arrays(state))))
            loss = loss + m["last"](state[0]).square().mean()
        return loss

    assert note(diagnose(step, model)).location.endswith(f":{line_of('states')}")


# ---- Healthy steps: values that leave, and others that come in ------------------------------------------------------


def agent():
    return nn.ModuleDict({"body": nn.Linear(6, 6), "policy": nn.Linear(6, 3), "value": nn.Linear(6, 1)})


class Logger:
    """Keeps what it is given, and prints a line."""

    def __init__(self):
        self.total, self.history, self.scale = 0.0, [], 0.5

    def __call__(self, **values):
        self.history.append(values)
        self.total += sum(value for value in values.values() if isinstance(value, float))
        assert len(" ".join(f"{name} {value}" for name, value in values.items())) > 0


def logged(m):
    log = Logger()
    h = torch.tanh(m["body"](X))
    log(mean=h.mean().item(), norm=float(h.detach().norm()), largest=h.abs().max().item())
    value = m["value"](h).squeeze(-1)
    loss = F.mse_loss(value, torch.from_numpy(REWARDS.numpy().copy()))
    log(value=loss.item(), values=value.tolist(), text=f"{loss:.3f} {value[0].item():.3f}")
    policy = F.cross_entropy(m["policy"](h), torch.tensor([1, 0, 2, 1] * 4))
    log(policy=policy.item(), total=(loss + policy).item())
    return log.scale * loss + policy * torch.tensor(0.25) + torch.tensor(0.01) * h.square().mean()


def metrics(m):
    values = m["value"](torch.tanh(m["body"](X))).squeeze(-1)
    predicted, targets = values.detach().numpy(), TARGETS.numpy().copy()
    assert np.abs(predicted - targets).mean() > 0
    assert np.corrcoef(predicted, targets).shape == (2, 2)
    probabilities = m["policy"](torch.tanh(m["body"](X))).softmax(-1)
    accuracy = (probabilities.detach().numpy().argmax(-1) == np.arange(16) % 3).mean()
    policy_loss = F.cross_entropy(probabilities.log(), torch.from_numpy(np.arange(16) % 3))
    return F.mse_loss(values, torch.from_numpy(targets)) + policy_loss * (1.0 + 0.0 * accuracy)


def regression(m):
    """The predictions are in the order of the data, because the data has one dimension."""
    x = torch.linspace(-1, 1, 50)[torch.randperm(50)]
    prediction = m["line"](x[:, None])
    assert np.isfinite(prediction.detach().numpy()).all()
    assert len(prediction.tolist()) == 50
    return F.mse_loss(prediction, torch.from_numpy(3 * x.numpy() + 1)[:, None])


def replayed(m):
    """Values and priorities are written to a replay buffer; a batch of other transitions comes back."""
    generator = np.random.default_rng(0)
    buffer = {
        "observation": generator.normal(size=(64, 6)),
        "value": generator.normal(size=64),
        "priority": np.ones(64),
    }
    with torch.no_grad():
        buffer["value"][:16] = m["value"](torch.tanh(m["body"](X))).squeeze(-1).numpy()
    index = generator.integers(16, 64, size=16)
    batch = torch.from_numpy(buffer["observation"][index]).float()
    value = m["value"](torch.tanh(m["body"](batch))).squeeze(-1)
    error = value - torch.from_numpy(buffer["value"][index])
    buffer["priority"][index] = error.detach().abs().numpy() + 1e-3
    weights = torch.from_numpy((64 * buffer["priority"][16:32]) ** -0.5).float()
    return (error.square() * weights).mean() + m["policy"](torch.tanh(m["body"](batch))).square().mean()


class Line:
    """A point that moves on a line, in NumPy."""

    def __init__(self):
        self.position, self.velocity = 0.1, 0.0

    def step(self, force):
        self.velocity += 0.05 * force - 0.01 * self.velocity
        self.position += 0.1 * self.velocity
        return np.array([self.position, self.velocity, 1, 0, 0, 0], np.float32), -abs(self.position)


def acted(choose):
    def step(m):
        environment, observation, log_probs, rewards = Line(), X[0], [], []
        for _ in range(5):
            h = torch.tanh(m["body"](observation))
            action, log_prob = choose(m["policy"](h))
            array, reward = environment.step(action)
            observation = torch.from_numpy(array)
            log_probs.append(log_prob)
            rewards.append(reward + 0.0 * m["value"](h).item())
        returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
        return -(torch.stack(log_probs) * returns).mean() + m["value"](h).square().mean()

    return step


def largest(logits):
    action = logits.argmax().item()
    return action - 1, logits.log_softmax(-1)[action]


def drawn(logits):
    distribution = torch.distributions.Categorical(logits=logits)
    action = distribution.sample()
    return action.item() - 1, distribution.log_prob(action)


EPSILONS = itertools.accumulate(itertools.repeat(0.9), lambda epsilon, factor: factor * epsilon)


def epsilon_greedy(logits):
    action = int(np.random.default_rng(0).integers(3)) if next(EPSILONS) > 0.5 else int(logits.argmax())
    return action - 1, logits.log_softmax(-1)[action]


def continuous(logits):
    distribution = torch.distributions.Normal(logits[0].tanh(), 0.5)
    action = distribution.sample()
    return action.item(), distribution.log_prob(action)


def deterministic(logits):
    force = logits[0].tanh()
    return force.item(), force


def returned_action(m):
    """The action that a policy has drawn comes back from NumPy, and its probability is differentiated."""
    distribution = torch.distributions.Normal(m["policy"](torch.tanh(m["body"](X))), 1.0)
    actions = distribution.sample().numpy()
    log_prob = distribution.log_prob(torch.from_numpy(actions.copy())).sum(-1)
    return -(log_prob * REWARDS).mean() + m["value"](torch.tanh(m["body"](X))).square().mean()


def straight_through(m):
    h = m["body"](X)
    h = h + (torch.from_numpy(np.round(h.detach().numpy(), 1)) - h.detach())
    h = h / (h.norm().item() + 1e-6) * 3
    h = h * 0.5 + torch.tensor(h.tolist()) * 0.5
    return m["policy"](h).square().mean() + m["value"](h).square().mean()


def chosen_rows(m):
    """Indices from NumPy and from lists have no gradient, whatever they were chosen by."""
    h = torch.tanh(m["body"](X))
    order = torch.from_numpy(np.argsort(h.detach().numpy()[:, 0]))
    best = torch.tensor(m["policy"](h).argmax(-1).tolist())
    kept = torch.tensor((h.detach().numpy().mean(-1) > -10).tolist())
    return m["policy"](h[order]).gather(1, best[:, None])[kept].square().mean() + m["value"](h).square().mean()


class Normalised(nn.Module):
    """Running statistics, which NumPy computes, in buffers and in numbers."""

    def __init__(self):
        super().__init__()
        self.body, self.last, self.mean = nn.Linear(6, 6), nn.Linear(6, 1), 0.0
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x):
        h = self.body(x)
        self.scale.copy_(torch.from_numpy(h.detach().numpy().std(0)))
        self.mean = 0.9 * self.mean + 0.1 * h.mean().item()
        return self.last((h - self.mean) / self.scale).square().mean()


def histograms(m):
    """Weights leave for a histogram; other layers have equal ones, as layers that were copied."""
    m["encoder"](X[:, None])
    for parameter in m["encoder"].layers[0].parameters():
        np.histogram(parameter.detach().numpy())
        parameter.detach().clone().tolist()
    return m["encoder"](Y[:, None]).square().mean()


def checkpointed(m):
    """The model and its optimizer are written to a file and read again."""
    file = io.BytesIO()
    torch.save(m.state_dict(), file)
    file.seek(0)
    m.load_state_dict(torch.load(file))
    h = torch.tanh(m["body"](X))
    return m["policy"](h).square().mean() + m["value"](h).square().mean()


def layers():
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    return nn.ModuleDict({"encoder": nn.TransformerEncoder(layer, 2)})


QUIET = {
    "logged": (logged, agent),
    "metrics": (metrics, agent),
    "regression": (regression, lambda: nn.ModuleDict({"line": nn.Linear(1, 1)})),
    "replayed": (replayed, agent),
    "largest": (acted(largest), agent),
    "drawn": (acted(drawn), agent),
    "epsilon_greedy": (acted(epsilon_greedy), agent),
    "continuous": (acted(continuous), agent),
    "deterministic": (acted(deterministic), agent),
    "returned_action": (returned_action, agent),
    "straight_through": (straight_through, agent),
    "chosen_rows": (chosen_rows, agent),
    "normalised": (lambda m: m["model"](X), lambda: nn.ModuleDict({"model": Normalised()})),
    "histograms": (histograms, layers),
    "checkpointed": (checkpointed, agent),
}


@pytest.mark.parametrize("name", QUIET)
def test_values_that_leave_and_do_not_come_back_are_no_finding(name):
    step, make = QUIET[name]
    for seed in range(3):
        torch.manual_seed(seed)
        assert diagnose(step, make()).findings == []


def test_the_note_names_both_lines():
    model = recurrent()

    def step(m):
        first = m["cell"](X)
        array = first.detach().numpy()  # <- left
        back = torch.from_numpy(np.tanh(array))  # <- back
        return m["last"](m["cell"](X, back) + first).square().mean()

    finding = note(diagnose(step, model))
    assert finding.location.endswith(f":{line_of('left')}")
    returned = (
        f"(which may come back at {finding.location.rpartition(':')[0]}:{line_of('back')}, in a tensor of its shape)"
    )
    assert finding.cause.startswith(f"a cut enters the loss: the result of detach {returned} sends no gradient to")


def test_the_only_path_of_a_parameter():
    model = nn.ModuleDict({"first": nn.Linear(6, 6), "last": nn.Linear(6, 1)})
    findings = diagnose(lambda m: m["last"](torch.tensor(m["first"](X).tolist())).mean(), model).findings  # <- only
    assert [(finding.code, finding.parameter) for finding in findings] == [
        ("detached", "first.weight"),
        ("detached", "first.bias"),
    ]
    for finding in findings:
        line = f"{finding.location.rpartition(':')[0]}:{line_of('only')}"
        assert finding.location == line
        assert finding.cause == (
            "possibly: the loss depends on it only through the result of tolist (which may come back at "
            f"{line}, in a tensor of its shape), which is cut off from the graph"
        )


def test_another_tensor_of_the_shape_is_a_note_too():
    """The rule goes by the shape alone: numbers may have been changed outside."""
    model = agent()

    def step(m):
        h = torch.tanh(m["body"](X))
        assert len(m["policy"](h).tolist()) == 16  # <- logged
        searched = torch.from_numpy(np.full((16, 3), 1 / 3, np.float32))
        return -(searched * m["policy"](h).log_softmax(-1)).sum(-1).mean() + m["value"](h).square().mean()

    assert note(diagnose(step, model)).location.endswith(f":{line_of('logged')}")


def test_a_tensor_that_was_made_before_is_no_note():
    target = torch.from_numpy(Y.numpy().copy())

    def step(m):
        h = m["cell"](X, Y)
        assert np.isfinite(h.detach().numpy()).all()
        return F.mse_loss(h, target) + m["last"](h + torch.randn(16, 6) + torch.zeros(16, 6)).mean()

    assert diagnose(step, recurrent()).findings == []


def test_functions_are_put_back():
    """Also if the block raises. Other threads are not watched."""
    before = [getattr(owner, name) for owner, name in FROM_OUTSIDE_UNSEEN]
    model, made = recurrent(), []
    with contextlib.suppress(KeyError), GradientTracer(), GradientTracer():
        raise KeyError
    with GradientTracer() as tracer:
        h = model["cell"](X, Y)
        array = h.detach().numpy()
        thread = threading.Thread(target=lambda: made.append(torch.from_numpy(array.copy())))
        thread.start()
        thread.join()
        loss = model["last"](h + made[0]).mean()
    assert gs.diagnose_gradients(loss, model, tracer=tracer).findings == []
    assert [getattr(owner, name) for owner, name in FROM_OUTSIDE_UNSEEN] == before


# ---- Contexts -------------------------------------------------------------------------------------------------------


class Counted(TorchDispatchMode):
    """Counts the operations that a dispatch mode sees."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_reading_numbers_calls_no_operation_that_a_mode_sees():
    counts = []
    for tracer in (contextlib.nullcontext(), GradientTracer()):
        with Counted() as counted, tracer:
            assert (unrolled(recurrent(), by_copied_array) * 0.3).item() > 0
        counts.append(counted.count)
    assert counts[0] == counts[1] > 0


def test_fake_tensors_next_to_values_that_left():
    model = recurrent()
    with GradientTracer() as tracer:
        hidden = model["cell"](X)
        array = hidden.numpy(force=True)  # <- fake
        with FakeTensorMode():
            assert (torch.ones(3) * 0.3 + torch.tensor([1.0, 2.5, 0.1])).shape == (3,)
        loss = model["last"](model["cell"](X, torch.from_numpy(array)) + hidden).sum()
    assert note(gs.diagnose_gradients(loss, model, tracer=tracer)).location.endswith(f":{line_of('fake')}")


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_without_gradients_the_note_is_about_the_block(context):
    model = recurrent()
    with GradientTracer() as tracer:
        with context():
            hidden = model["cell"](X, X)
        loss = model["last"](model["cell"](X, torch.tensor(hidden.tolist()))).sum()
    assert note(gs.diagnose_gradients(loss, model, tracer=tracer)).code == "no_grad"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_cannot_be_read():
    """No memory, memory that was freed, nested tensors, a view that is larger than its memory."""
    model = nn.ModuleDict({"cell": nn.Linear(6, 6), "unused": nn.Linear(6, 6)})
    rows, wide = torch.nested.nested_tensor([X[:2], X[:3]]), torch.zeros(1).expand(2**40)
    with GradientTracer() as tracer:
        loss = model["cell"](X).square().mean()
        assert loss.item() > 0
        assert torch.ones(3, device="meta").mul(2).shape == (3,)
        assert torch.nested.to_padded_tensor(rows * 2, 0.0).shape == (2, 3, 6)
        loss = loss + wide[:3].sum() + torch.zeros(0, 6).sum()
        model["unused"].weight.untyped_storage().resize_(0)
    findings = gs.diagnose_gradients(loss, model, tracer=tracer).findings
    assert [(finding.code, finding.parameter) for finding in findings] == [
        ("unused", "unused.weight"),
        ("unused", "unused.bias"),
    ]


def test_arguments_that_are_no_numbers_raise_their_own_errors():
    model = recurrent()
    with GradientTracer():
        assert model["cell"](X).sum().item() != 0
        for data in (["a"], [[1], [1, 2]], [None], np.array(["a"]), np.array([{}]), [2**70]):
            with pytest.raises((TypeError, ValueError, RuntimeError, OverflowError)) as traced:
                torch.tensor(data)
            with pytest.raises(traced.type, match=re.escape(str(traced.value))), torch._C.DisableTorchFunction():
                torch.tensor(data)
        for empty in ([], (), [[], []], np.zeros((0, 3))):
            assert torch.tensor(empty).numel() == 0


def test_numpy_numbers_next_to_a_constant_that_is_a_tuple():
    def step(m):
        h = m["cell"](X, X)
        assert h.mean().item() < 10
        return (m["last"](h) * np.float64(0.3)).reshape((16, 1)).square().mean()

    assert diagnose(step, recurrent()).findings == []


def test_values_that_left_are_not_kept_alive():
    layer = nn.Linear(4, 4)
    with GradientTracer():
        h = layer(torch.ones(2, 4)).relu()
        array = h.detach().numpy()
        back, copied = torch.from_numpy(array), torch.tensor(h.tolist())
        loss = (h * back * copied).sum()
    alive = [weakref.ref(value) for value in (h, array, back, copied, loss)]
    del h, array, back, copied, loss
    gc.collect()
    assert [reference() for reference in alive] == [None] * 5


def test_values_that_left_in_an_earlier_block_are_forgotten():
    model, tracer = recurrent(), GradientTracer()
    with tracer:
        numbers = model["cell"](X, X).tolist()
    with tracer:
        loss = model["last"](model["cell"](X, torch.tensor(numbers))).sum()
    assert gs.diagnose_gradients(loss, model, tracer=tracer).findings == []


def test_compiled_functions():
    compiled = torch.compile(lambda m: unrolled(m, by_copied_array), backend="aot_eager")
    assert note(diagnose(compiled, recurrent())).location.endswith(f":{line_of('copy')}")
