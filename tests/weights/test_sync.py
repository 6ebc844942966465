"""The state machine of a weight update, against servers of every version, healthy and not."""

import threading
import time

import pytest
import torch
from fixtures.syncs import CALLS_OF_AN_UPDATE, JOIN, REPAIR, assert_received, small_model, sync_with
from fixtures.vllm_stub import VERSIONS, Fault, running_stub

from trl.errors import WeightSyncError
from trl.weights.source import PolicyWeights
from trl.weights.sync import check_shapes
from trl.weights.transfer import free_port

# For updates that are to fail by it; all others have more time than a busy machine needs.
DEADLINE = 1.0
PHASES = {
    "join": JOIN,
    "pause": "/pause",
    "start": "/start_weight_update",
    "update": "/update_weights",
    "finish": "/finish_weight_update",
    "caches": "/reset_prefix_cache",
    "resume": "/resume",
    "verify": "/weight_info",
}
both_backends = pytest.mark.parametrize("backend", ["gloo", "shm"])


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("trl.generation.vllm_client._RETRY_PAUSE_S", 0.02)


def verified(version: str) -> list[str]:
    return ["/weight_info"] if float(version) >= 0.27 else []


def fail(sync, model, version=1, limit=3.0) -> WeightSyncError:
    """The error of an update, which has to come within the deadline and two seconds."""
    usual, sync._deadline = sync._deadline, limit
    began = time.monotonic()
    with pytest.raises(WeightSyncError) as caught:
        sync.update(PolicyWeights(model), version)
    assert time.monotonic() - began < limit + 2
    sync._deadline = usual
    return caught.value


# ---- a healthy server ----


@both_backends
@pytest.mark.parametrize("version", VERSIONS)
def test_calls_are_made_in_the_documented_order(version, backend):
    model = small_model()
    with running_stub(version, backend=backend) as server:
        sync = sync_with(server)
        report = sync.update(PolicyWeights(model), 3)
        assert server.paths() == [JOIN, *CALLS_OF_AN_UPDATE, *verified(version)]
        assert server.of("/pause")[0].query == {"mode": "keep", "clear_cache": "false"}
        assert server.of("/start_weight_update")[0].body == {}
        assert server.of("/finish_weight_update")[0].body == ({"weight_version": "step-3"} if verified(version) else {})
        assert_received(server, model)
        assert not server.paused
        assert (report.num_bytes, report.rejoined) == (140, False)
        assert set(report.seconds) == {"check", "join", *PHASES} - (set() if verified(version) else {"verify"})
        sync.close()


@both_backends
def test_a_second_update_sends_the_new_weights(backend):
    model = small_model()
    with running_stub("0.32", backend=backend) as server:
        sync = sync_with(server)
        sync.update(PolicyWeights(model), 1)
        assert sync.serves(1)
        assert not sync.serves(2)
        server.calls.clear()
        with torch.no_grad():
            model["first"].weight.add_(1)
        sync.update(PolicyWeights(model, torch.bfloat16), 2)
        assert_received(server, model, torch.bfloat16)
        # A group stays; shared memory is announced each time.
        assert (JOIN in server.paths()) == (backend == "shm")
        assert server.state.label == "step-2"
        sync.close()


def test_image_features_are_forgotten_too():
    with running_stub("0.32") as server:
        sync = sync_with(server, has_images=True)
        sync.update(PolicyWeights(small_model()), 1)
        assert server.paths()[-4:] == ["/reset_prefix_cache", "/reset_encoder_cache", "/resume", "/weight_info"]
        sync.close()


def test_requests_wait_while_weights_are_on_their_way():
    """One that came in between start and finish would kill the server."""
    with running_stub("0.32", faults={"/finish_weight_update": Fault("late", seconds=0.3)}) as server:
        sync, client = sync_with(server), server.client()
        thread = threading.Thread(target=sync.update, args=(PolicyWeights(small_model()), 1), daemon=True)
        thread.start()
        while not server.state.empty:
            time.sleep(0.01)
        (choice,) = client.completions([[5]], {"n": 1, "max_tokens": 3, "logprobs": 0})
        thread.join(5)
        assert choice.token_ids == [6, 7, 1]
        assert not server.dead
        sync.close()


# ---- before anything is sent ----


def test_another_model_is_noticed_before_the_first_call():
    with running_stub("0.32") as server:
        for expected, words in (
            ({"first.weight": (5, 4)}, r"first.weight has shape \[5, 3\] here and \[5, 4\] on the server"),
            ({"other.weight": (1,)}, r"no tensor of the policy is in the server's checkpoint"),
        ):
            sync = sync_with(server, expected=expected)
            error = fail(sync, small_model())
            assert (error.phase, error.repaired, server.calls) == ("check", True, [])
            with pytest.raises(ValueError, match=words):
                check_shapes(PolicyWeights(small_model()).metadata(), expected)


def test_names_that_only_one_side_has_are_no_failure():
    check_shapes(PolicyWeights(small_model()).metadata(), {"first.weight": (5, 3), "lm_head.weight": (7, 7)})


# ---- a server that fails ----

FAULTS = {"hang": Fault("hang"), "status": Fault("status", "words of the server"), "drop": Fault("drop")}
IN_THE_MIDDLE = ("start", "update", "finish")
cases = pytest.mark.parametrize(
    ("version", "backend", "phase", "kind"),
    [
        (version, backend, phase, kind)
        for version, backend in (("0.32", "gloo"), ("0.26", "shm"))
        for phase in PHASES
        for kind in FAULTS
        if version == "0.32" or (phase != "verify" and kind != "hang")
    ],
)


@cases
def test_a_phase_that_fails_once_is_named_and_put_right(version, backend, phase, kind):
    old, new = small_model(0), small_model(1)
    with running_stub(version, backend=backend) as server:
        sync = sync_with(server)
        sync.update(PolicyWeights(old), 1)
        if phase == "join":
            sync.close()
        server.calls.clear()
        # What may be repeated is, so a connection has to break more often.
        times = 3 if kind == "drop" and phase in ("pause", "caches", "resume", "verify") else 1
        server.faults[PHASES[phase]] = Fault(kind, "words of the server", times=times)
        error = fail(sync, new, 2, limit=DEADLINE if kind == "hang" else 3.0)
        assert error.phase == phase
        assert f"phase {phase}" in str(error)
        assert server.url in str(error)
        assert kind != "status" or "words of the server" in str(error)
        if phase in IN_THE_MIDDLE:
            assert server.paths()[-4:] == REPAIR
        # Later than that some or all of the weights may be the new ones: no word of the previous ones.
        assert error.repaired == (phase in ("join", "pause", "start"))
        assert "It serves the weights it had before." in str(error) or not error.repaired
        assert sync.serves(1) or not error.repaired
        if error.repaired:
            assert_received(server, old)
        assert server.paused == (phase == "resume")
        assert not server.state.empty
        # Whatever happened, the next update goes through.
        sync.update(PolicyWeights(new), 3)
        assert_received(server, new)
        assert not server.paused
        sync.close()


@both_backends
def test_an_update_that_fails_in_the_worker_puts_the_old_weights_back(backend):
    old, new = small_model(0), small_model(1)
    with running_stub("0.32", backend=backend) as server:
        sync = sync_with(server)
        sync.update(PolicyWeights(old), 1)
        server.calls.clear()
        server.state.broken = "out of memory"
        error = fail(sync, new, 2)
        assert (error.phase, error.repaired) == ("update", True)
        assert "out of memory" in str(error)
        assert server.paths()[-4:] == REPAIR
        assert_received(server, old)
        assert sync.serves(1)
        assert not server.paused
        sync.update(PolicyWeights(new), 3)
        assert_received(server, new)
        sync.close()


def test_weights_that_may_be_half_new_are_not_called_the_old_ones():
    """Of three chunks the second never reaches the server, whose update stays open."""
    with running_stub("0.32", backend="shm") as server:
        sync = sync_with(server)
        sync._transfer._buffer_bytes = 60
        sync.update(PolicyWeights(small_model(0)), 1)

        class Cut(PolicyWeights):
            def __iter__(self):
                for place, entry in enumerate(super().__iter__()):
                    if place == 1:
                        server.faults["/update_weights"] = Fault("drop", times=1)
                    yield entry

        began = server.state.weights
        with pytest.raises(WeightSyncError, match="some of its weights may be the new ones") as caught:
            sync.update(Cut(small_model(1)), 2)
        assert (caught.value.phase, caught.value.repaired) == ("update", False)
        changed = [n for n, t in server.state.weights.items() if not torch.equal(t, began[n])]
        assert changed == ["first.weight"]
        assert not sync.serves(1)
        sync.close()


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("phase", IN_THE_MIDDLE)
def test_a_server_that_stays_broken_is_given_up_in_time(phase, kind):
    with running_stub("0.32") as server:
        sync = sync_with(server)
        sync.update(PolicyWeights(small_model()), 1)
        server.calls.clear()
        for path in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
            if list(PHASES.values()).index(path) >= list(PHASES.values()).index(PHASES[phase]):
                server.faults[path] = Fault(kind, "words of the server")
        error = fail(sync, small_model(1), 2, limit=DEADLINE)
        assert (error.phase, error.repaired) == (phase, False)
        assert "restart it" in str(error)
        # It has tried to close the update.
        assert server.paths()[-2:] == ["/start_weight_update", "/finish_weight_update"]
        assert not sync.serves(1)
        sync.close()


def test_a_server_left_in_the_middle_of_an_update_is_used_again():
    """By a trainer that was killed."""
    with running_stub("0.32") as server:
        server.state.start()
        sync = sync_with(server)
        sync.update(PolicyWeights(small_model()), 1)
        assert_received(server, small_model())
        sync.close()


@pytest.mark.parametrize("phase", IN_THE_MIDDLE)
def test_an_answer_that_is_lost_on_its_way_is_put_right(phase):
    """The server did what it was asked to, and the connection broke before it could say so."""
    with running_stub("0.32") as server:
        sync = sync_with(server)
        sync.update(PolicyWeights(small_model()), 1)
        server.faults[PHASES[phase]] = Fault("after", times=1)
        error = fail(sync, small_model(1), 2)
        assert (error.phase, error.repaired) == (phase, phase == "start")
        assert not server.state.empty
        assert not server.paused
        sync.update(PolicyWeights(small_model(2)), 3)
        assert_received(server, small_model(2))
        sync.close()


def test_a_late_answer_after_the_deadline_is_a_failure_that_is_put_right():
    with running_stub(
        "0.32", faults={"/start_weight_update": Fault("late", seconds=DEADLINE + 0.3, times=1)}
    ) as server:
        sync = sync_with(server)
        error = fail(sync, small_model(), limit=DEADLINE)
        assert (error.phase, error.repaired) == ("start", True)
        time.sleep(0.5)
        sync.update(PolicyWeights(small_model()), 1)
        assert_received(server, small_model())
        sync.close()


def test_a_failed_update_does_not_disturb_the_next_one():
    """The broadcast of the first is still stuck while the second runs, over the same port."""
    big, port = torch.nn.ModuleDict({"a": torch.nn.Linear(4096, 2048)}), free_port()
    with running_stub("0.32", faults={"/update_weights": Fault("hang", times=1)}) as server:
        sync = sync_with(server, port=port)
        assert fail(sync, big, 1, limit=DEADLINE).phase == "update"
        for version in (2, 3):
            with torch.no_grad():
                big["a"].weight.add_(1)
            sync.update(PolicyWeights(big), version)
            assert_received(server, big)
        sync.close()


def test_the_tensor_that_was_on_its_way_is_named():
    with running_stub("0.32", faults={"/update_weights": Fault("status", times=1)}) as server:
        sync = sync_with(server)
        assert "The tensor being sent was first.weight." in str(fail(sync, small_model()))
        sync.close()


def test_an_interrupt_does_not_leave_the_server_without_weights():
    class Interrupted(PolicyWeights):
        def __iter__(self):
            raise KeyboardInterrupt

    with running_stub("0.32") as server:
        sync = sync_with(server)
        with pytest.raises(KeyboardInterrupt):
            sync.update(Interrupted(small_model()), 1)
        assert server.paths()[-4:] == REPAIR
        assert (server.state.empty, server.paused) == (False, False)
        sync.close()


# ---- the three cases of a stuck or failed transfer ----


def test_a_start_that_is_refused_is_told_in_the_servers_words():
    with running_stub("0.32", faults={"/start_weight_update": Fault("status", "text X")}) as server:
        error = fail(sync_with(server), small_model())
        assert "text X" in str(error)
        assert "/start_weight_update" in str(error)
        assert server.paths()[-1] == "/finish_weight_update"


def test_an_update_that_never_answers_ends_at_the_timeout():
    with running_stub("0.32", faults={"/update_weights": Fault("hang")}) as server:
        error = fail(sync_with(server), small_model(), limit=DEADLINE)
        assert error.phase == "update"
        assert f"127.0.0.1:{server.port}" in str(error)
        assert server.paths()[-4:] == REPAIR


def test_a_server_that_is_gone_at_the_start_is_named():
    with running_stub("0.32") as server:
        sync = sync_with(server)
        sync.update(PolicyWeights(small_model()), 1)
        server.stop()
        error = fail(sync, small_model(), 2)
        assert f"127.0.0.1:{server.port}" in str(error)
        assert (error.phase, error.repaired) == ("pause", False)
        sync.close()


def test_a_server_that_dies_in_the_middle_is_an_error_in_time():
    class Deadly(PolicyWeights):
        def __iter__(self):
            server.stop()
            return super().__iter__()

    with running_stub("0.32") as server:
        sync = sync_with(server)
        with pytest.raises(WeightSyncError) as caught:
            sync.update(Deadly(small_model()), 1)
        assert (caught.value.phase, caught.value.repaired) == ("update", False)
        assert f"127.0.0.1:{server.port}" in str(caught.value)
        assert "restart it" in str(caught.value)
        sync.close()


# ---- a server that was restarted ----


@both_backends
@pytest.mark.parametrize("version", VERSIONS)
def test_a_restarted_server_receives_everything_again(version, backend):
    with running_stub(version, backend=backend) as server:
        sync = sync_with(server)
        sync.update(PolicyWeights(small_model()), 1)
        server.restart()
        assert server.state.weights == {}
        if verified(version):
            assert not sync.serves(1)
        report = sync.update(PolicyWeights(small_model(1)), 2)
        assert_received(server, small_model(1))
        assert (server.paused, server.state.empty) == (False, False)
        assert report.rejoined == (backend == "gloo")
        assert sync.version == 2
        sync.close()


def test_somebody_elses_weights_are_noticed():
    with running_stub("0.32") as server:
        sync = sync_with(server)
        sync.update(PolicyWeights(small_model()), 1)
        server.state.label = "step-7"
        assert not sync.serves(1)
        sync.close()


# ---- what the protocol does not tell ----


def test_a_tensor_the_server_loses_shows_in_its_log_probs_alone():
    """Every call succeeds: only scoring the same tokens on both sides (`generation.parity`) finds it."""
    old, new = (torch.nn.ModuleDict({"lm_head": torch.nn.Linear(64, 64, bias=False)}) for _ in range(2))
    start = {n: t.clone() for n, t in PolicyWeights(old)}
    with running_stub("0.32", weights=start) as server:
        sync, client = sync_with(server), server.client()
        before = client.prompt_logps([[5, 6, 7]])[0]
        server.lose = server.state._lose = "lm_head.weight"
        sync.update(PolicyWeights(new), 1)
        assert client.prompt_logps([[5, 6, 7]])[0] == before
        server.state._lose = None
        sync.update(PolicyWeights(new), 2)
        expected = torch.log_softmax(8 * new["lm_head"].weight.detach().double().T, 1)
        assert client.prompt_logps([[5, 6, 7]])[0] == pytest.approx([float(expected[5, 6]), float(expected[6, 7])])
        sync.close()
