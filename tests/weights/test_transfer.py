"""How bytes travel: announcements of every version, borders, and what is left after a failure."""

import os
import time

import pytest
import torch
from fixtures.syncs import CPU, small_model, transfer_to
from fixtures.vllm_stub import VERSIONS, Fault, running_stub

from trl.errors import ServerError, ServerTimeoutError, WeightSyncError
from trl.generation.vllm_probe import probe
from trl.weights.background import DaemonPool, together
from trl.weights.source import PolicyWeights
from trl.weights.transfer import BroadcastTransfer, SharedMemoryTransfer, free_port, make_transfer, own_address

# The model has tensors of 60, 20, 20 and 40 bytes.
BUFFERS = [1, 60, 70, 100, 1 << 20]


def send(server, transfer, model, dtype=None, deadline=5.0):
    weights = PolicyWeights(model, dtype)
    server.state.start()
    transfer.send(weights.metadata(), weights, deadline)
    server.state.finish(None)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_receives_the_bytes(version, backend):
    with running_stub(version, backend=backend) as server:
        transfer = transfer_to(server)
        transfer.join(5.0)
        for dtype in (torch.bfloat16, None):
            model = small_model()
            send(server, transfer, model, dtype)
            for name, tensor in PolicyWeights(model, dtype):
                assert torch.equal(server.state.weights[name], tensor)
        transfer.close()


@pytest.mark.parametrize("buffer_bytes", BUFFERS)
@pytest.mark.parametrize(("version", "backend"), [("0.26", "gloo"), ("0.32", "gloo"), ("0.26", "shm"), ("0.32", "shm")])
def test_borders_fall_where_the_server_expects_them(version, backend, buffer_bytes):
    model = small_model()
    with running_stub(version, backend=backend) as server:
        transfer = transfer_to(server, buffer_bytes=buffer_bytes)
        transfer.join(5.0)
        send(server, transfer, model)
        transfer.close()
        assert all(torch.equal(server.state.weights[n], t) for n, t in PolicyWeights(model))


@pytest.mark.parametrize("version", VERSIONS)
def test_where_the_packed_layout_is_announced(version):
    with running_stub(version) as server:
        transfer = transfer_to(server, buffer_bytes=77)
        transfer.join(5.0)
        send(server, transfer, small_model())
        transfer.close()
        joining = server.of("/init_weight_transfer_engine")[0].body["init_info"]
        update = server.of("/update_weights")[0].body["update_info"]
    layout = {"packed": True, "packed_buffer_size_bytes": 77, "packed_num_buffers": 2}
    at_join, with_update = (layout, {}) if float(version) >= 0.28 else ({}, layout)
    port = joining["master_port"]
    assert joining == {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, **at_join}
    assert update == {
        "names": ["first.weight", "first.bias", "norm.weight", "last.weight"],
        "dtype_names": ["float32"] * 4,
        "shapes": [[5, 3], [5], [5], [2, 5]],
        **with_update,
    }


@pytest.mark.parametrize(("version", "at_join"), [("0.26", False), ("0.28", True)])
def test_where_shared_memory_says_that_it_is_packed(version, at_join):
    with running_stub(version, backend="shm") as server:
        transfer = transfer_to(server, buffer_bytes=60)
        transfer.join(5.0)
        send(server, transfer, small_model())
        transfer.close()
        assert server.of("/init_weight_transfer_engine")[0].body == {"init_info": {"packed": True} if at_join else {}}
        updates = [c.body["update_info"] for c in server.of("/update_weights")]
    assert [u.get("packed") for u in updates] == [None if at_join else True] * 3
    assert [u["tensor_sizes"] for u in updates] == [[60], [20, 20], [40]]


def test_the_shared_file_is_gone_after_closing():
    with running_stub("0.32", backend="shm") as server:
        transfer = transfer_to(server)
        transfer.join(5.0)
        send(server, transfer, small_model())
        path = str(transfer._memory._path)
        assert os.path.exists(path)
        transfer.close()
        assert not os.path.exists(path)


def test_after_a_failure_shared_memory_is_another():
    """A server that reads late reads what it was sent, not what comes next."""
    faults = {"/update_weights": Fault("status", times=1)}
    with running_stub("0.32", backend="shm", faults=faults) as server:
        transfer = transfer_to(server)
        transfer.join(5.0)
        weights = PolicyWeights(small_model())
        buffer, handle = transfer._memory.allocate(140)
        with pytest.raises(ServerError):
            transfer.send(weights.metadata(), weights, 5.0)
        again, other = transfer._memory.allocate(140)
        assert other != handle
        assert again.data_ptr() != buffer.data_ptr()
        transfer.close()


def test_a_failed_broadcast_names_the_tensor_and_leaves_the_group():
    faults = {"/update_weights": Fault("status", "worker is out of memory")}
    with running_stub("0.32", faults=faults) as server:
        transfer = transfer_to(server)
        transfer.join(5.0)
        assert transfer.joined
        weights = PolicyWeights(small_model())
        with pytest.raises(ServerError, match="worker is out of memory") as caught:
            transfer.send(weights.metadata(), weights, 5.0)
        assert caught.value.__notes__ == ["The tensor being sent was first.weight."]
        assert not transfer.joined


def test_a_stream_that_is_not_what_was_announced_is_not_sent():
    with running_stub("0.32") as server:
        transfer = transfer_to(server)
        transfer.join(5.0)
        server.state.start()
        weights = PolicyWeights(small_model())
        with pytest.raises(ValueError, match=r"first.weight was announced as torch.float32 .* came as torch.bfloat16"):
            transfer.send(weights.metadata(), weights.in_dtype(torch.bfloat16), 2.0)


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("gloo", BroadcastTransfer),
        ("nccl", BroadcastTransfer),
        ("shm", SharedMemoryTransfer),
        ("ipc", SharedMemoryTransfer),
    ],
)
def test_the_transfer_fits_the_servers_backend(backend, kind):
    with running_stub("0.32", backend=backend) as server:
        assert isinstance(transfer_to(server), kind)


@pytest.mark.parametrize(
    ("backend", "words"), [(None, "--weight-transfer-config"), ("zmq", "'zmq'.*start it with nccl")]
)
def test_other_backends_are_refused(backend, words):
    with running_stub("0.32", backend=backend) as server:
        client = server.client()
        with pytest.raises(WeightSyncError, match=words) as caught:
            make_transfer(client, probe(client), CPU, None)
    assert (caught.value.phase, caught.value.repaired) == ("check", True)


def test_joining_uses_the_port_that_was_asked_for():
    port = free_port()
    with running_stub("0.32") as server:
        transfer = transfer_to(server, port=port)
        transfer.join(5.0)
        transfer.join(5.0)
        assert [c.body["init_info"]["master_port"] for c in server.of("/init_weight_transfer_engine")] == [port, port]
        transfer.close()


def test_the_address_the_server_is_told(monkeypatch):
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    assert own_address("http://127.0.0.1:8000") == "127.0.0.1"
    monkeypatch.setenv("VLLM_HOST_IP", "10.1.2.3")
    assert own_address("http://127.0.0.1:8000") == "10.1.2.3"


# ---- what runs in the background ----


def test_together_gives_both_results():
    assert together(lambda: 1, lambda: 2, 5.0) == (1, 2)


def _fail(error: Exception, after: float = 0.0):
    time.sleep(after)
    raise error


def test_the_servers_words_are_waited_for_after_a_broken_broadcast():
    with pytest.raises(RuntimeError, match="peer closed") as caught:
        together(lambda: _fail(ServerError("not initialized"), 0.1), lambda: _fail(RuntimeError("peer closed")), 5.0)
    assert caught.value.__notes__ == ["The server: not initialized"]


def test_a_server_that_refuses_is_told_at_once():
    began = time.monotonic()
    with pytest.raises(ServerError, match="refused"):
        together(lambda: _fail(ServerError("refused")), lambda: time.sleep(2), 5.0)
    assert time.monotonic() - began < 1.5


def test_a_broken_broadcast_is_told_when_the_server_says_nothing(monkeypatch):
    monkeypatch.setattr("trl.weights.background._WORDS_S", 0.1)
    with pytest.raises(RuntimeError, match="peer closed"):
        together(lambda: time.sleep(2), lambda: _fail(RuntimeError("peer closed")), 5.0)


@pytest.mark.parametrize(("call", "work", "who"), [(0, 2, "This process"), (2, 0, "The server")])
def test_together_ends_at_the_deadline(call, work, who):
    began = time.monotonic()
    with pytest.raises(ServerTimeoutError, match=f"{who} did not end within 0.2 s"):
        together(lambda: time.sleep(call), lambda: time.sleep(work), 0.2)
    assert time.monotonic() - began < 1.5


def test_a_pool_yields_results_as_they_come_and_drops_the_rest_after_a_failure():
    begun = []

    def work(place: int) -> int:
        begun.append(place)
        time.sleep(0.02)
        if place == 1:
            raise ValueError("second")
        return 10 * place

    pool = DaemonPool(1, "test")
    results = pool.run([lambda i=i: work(i) for i in range(50)])
    assert next(results) == (0, 0)
    with pytest.raises(ValueError, match="second"):
        next(results)
    assert list(pool.run([lambda: "again"])) == [(0, "again")]
    assert len(begun) < 50
    pool.close()
