"""Activation offloading: the same gradients to the bit, and books that add up."""

import gc
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from fixtures.batches import random_batch
from fixtures.models import family_model, random_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from trl.errors import ConfigError
from trl.models import get_act_offloading_ctx_manager
from trl.models.forward import token_logps
from trl.models.load import disable_dropout
from trl.models.offload import MIN_BYTES, STASH, OffloadedActivations
from trl.types import RolloutBatch


class Exponentials(nn.Module):
    """Each of `count` steps saves its own result, and nothing else."""

    def __init__(self, count: int = 10):
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.count):
            x = (-x).exp()
        return x


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def exponentials(x: Tensor, **settings: int) -> tuple[Tensor, OffloadedActivations]:
    model = Exponentials()
    with OffloadedActivations(model, **settings) as offloaded:
        out = model(x)
    return out, offloaded


def gradient(x: Tensor, out: Tensor, **settings: bool) -> Tensor:
    return torch.autograd.grad(out.sum(), x, **settings)[0]


# ---- the books, by hand ----


def test_all_but_the_last_go_out_and_come_back_once():
    x = leaf(256)  # of four bytes: just large enough
    assert x.nbytes == MIN_BYTES
    out, offloaded = exponentials(x, stash=3)
    assert offloaded.copies_out == 10
    assert offloaded.stored_bytes == 7 * 1024
    grad = gradient(x, out)
    assert offloaded.copies_back == 7
    del out
    assert offloaded.stored_bytes == 0
    assert torch.equal(grad, gradient(x, Exponentials()(x)))


def test_small_tensors_stay():
    out, offloaded = exponentials(leaf(255))
    assert out.requires_grad
    assert offloaded.copies_out == 0


@pytest.mark.parametrize(("stash", "stored"), [(0, 10), (1, 9), (STASH, 5), (10, 0), (11, 0)])
def test_as_many_as_the_stash_holds_stay(stash, stored):
    x = leaf(256)
    out, offloaded = exponentials(x, stash=stash)
    assert offloaded.stored_bytes == stored * 1024
    assert torch.equal(gradient(x, out), gradient(x, Exponentials()(x)))
    assert offloaded.copies_back == stored


def test_with_the_backward_pass_inside():
    x, model = leaf(256), Exponentials()
    expected = gradient(x, model(x))
    with OffloadedActivations(model, stash=3) as offloaded:
        for step in range(1, 4):
            assert torch.equal(gradient(x, model(x)), expected)
            assert (offloaded.copies_out, offloaded.copies_back) == (10 * step, 7 * step)
            assert offloaded.stored_bytes == 0


def test_a_graph_that_is_thrown_away_leaves_nothing():
    out, offloaded = exponentials(leaf(256), stash=3)
    assert offloaded.stored_bytes == 7 * 1024
    del out
    assert offloaded.stored_bytes == 0


def test_tensors_that_stay_go_with_the_graph():
    out, offloaded = exponentials(leaf(10))
    assert offloaded.copies_out == 0
    storage = weakref.ref(out.untyped_storage())
    del out
    assert storage() is None


def test_views_of_one_storage_are_copied_once():
    # Saved as it is, transposed, and twice as a factor. The weight is 16 by 16 too, and stays.
    x, layer = leaf(16, 16), nn.Linear(16, 16, bias=False)

    def run() -> Tensor:
        h = x * 2
        return layer(h) + layer(h.T) + h * h

    with OffloadedActivations(layer, stash=0) as offloaded:
        out = run()
    assert (offloaded.copies_out, offloaded.stored_bytes) == (1, 1024)
    assert torch.equal(gradient(x, out), gradient(x, run()))
    assert offloaded.copies_back == 1


def test_of_a_small_part_only_the_part_is_copied():
    x, layer = leaf(16, 16), nn.Linear(16, 16, bias=False)
    with OffloadedActivations(layer, min_bytes=64, stash=0) as offloaded:
        out = layer((x * 2)[4:6])
    assert offloaded.stored_bytes == 2 * 16 * 4
    grad = torch.autograd.grad(out.sum(), layer.weight)[0]
    assert torch.equal(grad, (x * 2)[4:6].sum(0).expand(16, 16))


def test_expanded_tensors_are_copied_as_they_lie():
    x, layer = leaf(1, 16), nn.Linear(16, 16, bias=False)
    with OffloadedActivations(layer, min_bytes=64, stash=0) as offloaded:
        out = layer((x * 2).expand(100, 16))
    assert offloaded.stored_bytes == 16 * 4
    grad = torch.autograd.grad(out.sum(), layer.weight)[0]
    torch.testing.assert_close(grad, 200 * x.detach().expand(16, 16))


# ---- what stays ----


@pytest.mark.parametrize("autocast", [False, True])
def test_weights_and_buffers_stay(autocast):
    # Inputs and results have 2 by 32 elements, 256 bytes at most; the weights 32 by 32, 2,048 bytes at least.
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    model.register_buffer("scale", torch.ones(32, 32))
    precision = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with OffloadedActivations(model, min_bytes=512) as offloaded, precision:
        out = model(torch.ones(2, 32)) @ model.scale.to(torch.bfloat16 if autocast else torch.float32)
    assert out.requires_grad
    assert offloaded.copies_out == autocast  # the buffer's cast is no buffer
    with OffloadedActivations(model, min_bytes=512) as offloaded:
        out = model(torch.ones(2, 32)) @ model.scale
    assert offloaded.copies_out == 0


class WithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.exp())


def test_what_the_head_takes_and_gives_stays():
    x, model = leaf(16, 16), WithHead()
    with OffloadedActivations(model, stash=0) as offloaded:
        out = model(x).exp()
    assert offloaded.copies_out == 2  # the head's input, which `exp` saved before, and the last result
    with OffloadedActivations(model, model.head, stash=0) as offloaded:
        out = model(x).exp()
        assert offloaded.copies_out == 1
        out = out + model(x).exp()  # the head has been left
    assert offloaded.copies_out == 2
    assert torch.equal(gradient(x, out), gradient(x, model(x).exp() + model(x).exp()))
    with offloaded:
        assert x.exp().requires_grad
    assert offloaded.copies_out == 3


def test_the_head_of_a_language_model_is_found():
    model = random_model(packed=True)
    copies = []
    for head in (None, model.get_output_embeddings()):
        with OffloadedActivations(model, head, min_bytes=64, stash=0) as offloaded:
            out = token_logps(model, random_batch([5], [9], [0]))
        copies.append(offloaded.copies_out)
    with get_act_offloading_ctx_manager(model, min_offload_size=64, max_fwd_stash_size=0) as found:
        out = token_logps(model, random_batch([5], [9], [0]))
    assert out.logps.requires_grad
    assert found.copies_out == copies[1]
    # Where 9 tokens are predicted, the states there, targets and probabilities; normalizers have 36 bytes only.
    assert copies[0] - copies[1] == 4


def test_what_a_backward_pass_saves_itself_stays():
    x, model = leaf(256), Exponentials()
    with OffloadedActivations(model, stash=0) as offloaded:
        out = checkpoint(model, x, use_reentrant=True)
        assert offloaded.copies_out == 1  # the checkpoint's input
        grad = gradient_of_leaf(x, out)
        assert offloaded.copies_out == 1
    assert torch.equal(grad, gradient(x, model(x)))


def gradient_of_leaf(x: Tensor, out: Tensor) -> Tensor:
    out.sum().backward()
    assert x.grad is not None
    return x.grad


# ---- the same gradients ----


def gradients(model: nn.Module, packed: bool, context) -> list[Tensor]:
    """Of a mix of log-probs and entropies, of sequences that share prompts."""
    model.zero_grad()
    batch = random_batch([3, 1, 7], [4, 1, 6, 2, 1, 9], [0, 0, 1, 2, 2, 0])
    with context:
        out = token_logps(model, batch, packed=packed)
        loss = (out.logps * torch.linspace(-1, 1, 23)).sum() + out.entropies.square().sum()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_identical(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second) > 0
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "gpt2", "mixtral"])
def test_gradients_are_identical(family, autocast, packed):
    model = family_model(family, packed=True)
    disable_dropout(model)
    model.train()
    precision = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    expected = gradients(model, packed, precision)
    for stash in (0, 2, STASH):
        offloaded = get_act_offloading_ctx_manager(model, min_offload_size=64, max_fwd_stash_size=stash)
        with precision:
            assert_identical(gradients(model, packed, offloaded), expected)
        assert offloaded.copies_out > 20
        assert offloaded.copies_back == offloaded.copies_out - stash
        assert offloaded.stored_bytes == 0


def test_of_checkpointed_layers_the_inputs_are_moved():
    model = random_model(packed=True).train()
    expected = gradients(model, True, nullcontext())
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    # The row has 11 prompt tokens and 17 of the completions' inner parts, of 32 float32.
    offloaded = get_act_offloading_ctx_manager(model, min_offload_size=28 * 32 * 4, max_fwd_stash_size=0)
    assert_identical(gradients(model, True, offloaded), expected)
    # Two layers' inputs, the last norm's input and what it scales.
    assert offloaded.copies_out == offloaded.copies_back == 4


GARBAGE = 170


class LateCopies:
    """Copies as late as a stream may make them: one after the other, and none before somebody waits for it.

    Memory on the device that is given up before that belongs to others: what is read there is lost, and what is written
    there is an error.
    """

    written_over: list[int] = []

    def __init__(self, *_: object):
        self.queue: deque[Callable[[], object]] = deque()
        self.done = 0

    def out(self, source: Tensor) -> tuple[Tensor, int]:
        host, storage = torch.full_like(source, GARBAGE), weakref.ref(source.untyped_storage())
        offset = source.storage_offset()

        def copy() -> None:
            if (read := storage()) is not None:
                host.copy_(torch.empty(0, dtype=torch.uint8).set_(read, offset, host.shape, (1,)))

        return host, self.enqueue(copy)

    def back(self, host: Tensor) -> tuple[Tensor, int]:
        back = torch.full_like(host, GARBAGE)
        storage = weakref.ref(back.untyped_storage())

        def copy() -> None:
            if (target := storage()) is not None:
                torch.empty(0, dtype=torch.uint8).set_(target).copy_(host)
            else:
                self.written_over.append(len(host))

        return back, self.enqueue(copy)

    def enqueue(self, copy: Callable[[], None]) -> int:
        self.queue.append(copy)
        return self.done + len(self.queue)

    def wait(self, event: int) -> None:
        while self.done < event:
            self.queue.popleft()()
            self.done += 1


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LateCopies]]:
    made = []

    def make(*_: object) -> LateCopies:
        made.append(LateCopies())
        return made[-1]

    monkeypatch.setattr("trl.models.offload._Copier", make)
    monkeypatch.setattr(LateCopies, "written_over", [])
    yield made
    for copier in made:
        copier.wait(copier.done + len(copier.queue))
    assert not LateCopies.written_over


@pytest.mark.usefixtures("late_copies")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("stash", [0, 1, STASH])
def test_nothing_is_read_or_given_up_before_a_copy_is_complete(stash, checkpointing):
    model = random_model(packed=True).train()
    expected = gradients(model, True, nullcontext())
    if checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    offloaded = get_act_offloading_ctx_manager(model, min_offload_size=64, max_fwd_stash_size=stash)
    for _ in range(2):
        assert_identical(gradients(model, True, offloaded), expected)


def test_memory_of_copies_that_nobody_came_for_waits_for_them(late_copies):
    x, model = leaf(256), Exponentials()
    with OffloadedActivations(model, stash=2):
        half = model(x)
        out = model(half)
    # Reads the second half only, and fetches what comes before it.
    grad = torch.autograd.grad(out.sum(), half)[0]
    assert late_copies[0].queue
    del out, half
    assert not late_copies[0].queue
    half = model(x)
    assert torch.equal(grad, torch.autograd.grad(model(half).sum(), half)[0])


def test_two_backward_passes_through_one_graph():
    x = leaf(256)
    out, offloaded = exponentials(x, stash=3)
    first = gradient(x, out, retain_graph=True)
    assert offloaded.stored_bytes == 7 * 1024
    assert torch.equal(gradient(x, out), first)
    assert offloaded.copies_back == 14
    del out
    assert offloaded.stored_bytes == 0


def test_second_derivatives():
    x = leaf(256)
    expected = gradient(x, gradient(x, Exponentials()(x), create_graph=True))
    out, offloaded = exponentials(x, stash=2)
    first = gradient(x, out, create_graph=True)
    assert offloaded.copies_out == 10
    assert torch.equal(gradient(x, first), expected)
    del out, first
    gc.collect()
    assert offloaded.stored_bytes == 0


def test_an_unused_part_of_the_graph_does_no_harm():
    x, model = leaf(256), Exponentials()
    with OffloadedActivations(model, stash=1) as offloaded:
        thrown_away, kept, later = model(x), model(x), model(x * 2)
    del thrown_away
    assert torch.equal(gradient(x, kept), gradient(x, model(x)))
    assert torch.equal(gradient(x, later), gradient(x, model(x * 2)))
    del kept, later
    assert offloaded.stored_bytes == 0


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_two_forward_passes_through_a_distributed_model():
    model = random_model(packed=True).train()
    wrapped = DistributedDataParallel(model)
    batches = [random_batch([3], [9], [0], seed=seed) for seed in (0, 1)]

    def run(context) -> list[Tensor]:
        model.zero_grad()
        with context:
            first, second = (token_logps(wrapped, batch).logps for batch in batches)
        (first.sum() - second.square().sum()).backward()
        return [p.grad.clone() for p in model.parameters()]

    offloaded = get_act_offloading_ctx_manager(wrapped, min_offload_size=64, max_fwd_stash_size=2)
    assert_identical(run(offloaded), run(nullcontext()))
    assert offloaded.copies_back == offloaded.copies_out - 2 > 40
    assert offloaded.stored_bytes == 0


# ---- errors ----


@pytest.mark.parametrize(
    "settings", [{"min_bytes": 10**6}, {"stash": 5}, {"stash": 1}], ids=["small", "in the stash", "on its way"]
)
def test_a_tensor_changed_in_place_is_noticed_as_without_offloading(settings):
    x = leaf(16, 16)
    with OffloadedActivations(nn.Linear(1, 1), **settings):
        saved = x * 2
        out = saved * saved
        saved.add_(1)
        following = out.exp()  # fills a stash of one
    with pytest.raises(RuntimeError, match="changed by an in-place operation"):
        following.sum().backward()


def test_a_tensor_that_has_left_may_be_changed():
    x = leaf(16, 16)
    with OffloadedActivations(nn.Linear(1, 1), stash=0):
        saved = x * 2
        out = saved * saved
        saved.add_(1)
        out = out + saved * saved
    # Of (2 x)^2 + (2 x + 1)^2, each from a copy of its own.
    torch.testing.assert_close(gradient(x, out), 8 * x + 4 * (2 * x + 1))


def test_after_an_error_nothing_is_left():
    x, model = leaf(256), Exponentials()
    offloaded = OffloadedActivations(model, stash=3)
    results = []

    def fail() -> None:
        with offloaded:
            results.append(model(x))
            assert offloaded.stored_bytes == 10 * 1024
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        fail()
    assert caught.value.__traceback__ is not None  # which keeps frames and their tensors
    assert offloaded.stored_bytes == 0
    with pytest.raises(RuntimeError, match="an error ended their forward pass"):
        gradient(x, results[0])
    with offloaded:
        out = model(x)
    assert torch.equal(gradient(x, out), gradient(x, model(x)))


def test_an_error_in_the_backward_pass_leaves_nothing():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError

    x, model = leaf(256), Exponentials()
    offloaded = OffloadedActivations(model, stash=0)
    with pytest.raises(ZeroDivisionError), offloaded:
        model(Fails.apply(model(x))).sum().backward()
    assert offloaded.copies_back >= 10
    assert offloaded.stored_bytes == 0


def test_it_cannot_be_entered_inside_itself():
    x, model = leaf(256), Exponentials()
    with OffloadedActivations(model) as outer:
        for inner in (OffloadedActivations(model), outer):
            with pytest.raises(ConfigError, match="offloaded already"), inner:
                pass
        out = model(x)
    assert outer.copies_out == 10
    assert torch.equal(gradient(x, out), gradient(x, model(x)))
    with outer:
        pass


def test_outside_of_it_nothing_is_moved_and_no_hooks_are_left():
    model = WithHead()
    with OffloadedActivations(model, model.head, stash=0) as offloaded:
        pass
    assert model(leaf(16, 16)).requires_grad
    assert offloaded.copies_out == 0
    assert not model._forward_pre_hooks
    assert not model.head._forward_pre_hooks


@pytest.mark.parametrize("name", ["min_bytes", "stash"])
def test_negative_settings(name):
    with pytest.raises(ConfigError, match=f"`{name}` of activation offloading must not be negative \\(got -1\\)"):
        OffloadedActivations(Exponentials(), **{name: -1})


def test_importing_the_package_loads_no_torch():
    code = "import sys, trl.models; print('torch' in sys.modules, *dir(trl.models))"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert told[0] == "False"
    assert {"get_act_offloading_ctx_manager", "enable_selective_activation_checkpointing"} <= set(told)


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("stash", [0, 1, STASH])
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("pin_memory", [True, False])
def test_copies_on_a_gpu(pin_memory, streams, stash):
    """Products and elementwise functions, which give the same bits each time."""
    model = nn.Sequential(*[m for _ in range(24) for m in (nn.Linear(2048, 2048), nn.GELU())]).cuda()
    x = torch.randn(8192, 2048, device="cuda")

    def run(context) -> tuple[list[Tensor], int]:
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        with context:
            loss = model(x).square().mean()
        loss.backward()
        return [p.grad.clone() for p in model.parameters()], torch.cuda.max_memory_allocated()

    expected, peak = run(nullcontext())
    offloaded = OffloadedActivations(model, pin_memory=pin_memory, streams=streams, stash=stash)
    for _ in range(5):
        grads, lower = run(offloaded)
        assert_identical(grads, expected)
        assert offloaded.stored_bytes == 0
        assert lower < peak - 2**30  # of the 48 tensors of 64 MiB few are left
    assert offloaded.copies_back == offloaded.copies_out - 5 * stash


@pytest.mark.gpu
def test_a_language_model_on_a_gpu():
    model = random_model(packed=True, scale=1.0, hidden_size=256).to("cuda", torch.bfloat16).train()
    on_cpu = random_batch([16] * 16, [240] * 16, list(range(16)))
    batch = RolloutBatch.from_state_dict(on_cpu.state_dict(), torch.device("cuda"))
    results = []
    for context in (nullcontext(), get_act_offloading_ctx_manager(model, max_fwd_stash_size=1)):
        model.zero_grad()
        with context:
            loss = token_logps(model, batch).logps.mean()
        loss.backward()
        results.append([p.grad.clone() for p in model.parameters()])
    # The attention kernel adds gradients up in any order.
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * a.abs().max().item())
