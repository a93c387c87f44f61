"""The meter on a device played by the test: peaks land in the phase they belong to, resets by others lose none."""

import gc
import subprocess
import sys
import time

import pytest
import torch

from zerolab import probes
from zerolab.host_sampler import HostSampler, Samples
from zerolab.meter import DETAIL_INTERVAL, FIRST_DETAILED_STEPS, Meter
from zerolab.record import Record
from zerolab.steps import num_warmup_steps


class PlayedDevice:
    """An allocator of which the test moves the level; it keeps the peak as CUDA's does."""

    def __init__(self):
        self.allocated = self.peak = self.reserved = 0

    def move(self, *levels):
        for level in levels:
            self.allocated = level
            self.peak = max(self.peak, level)
            self.reserved = max(self.reserved, level)

    def read(self):
        return probes.Reading(self.allocated, self.peak, self.reserved)

    def reset(self):
        self.peak = self.allocated


class PlayedClock:
    name = "played"

    def __init__(self):
        self.now = 0.0
        self.released = []

    def mark(self):
        return [self.now]  # a list, so that two marks of one moment stay two

    def ready(self, mark):
        return True

    def seconds(self, start, end):
        return end[0] - start[0]

    def release(self, mark):
        self.released.append(mark)


class StillSampler:
    interval = 0.02

    def __init__(self):
        self.phase = None

    def set_phase(self, number):
        self.phase = number

    def set_device(self, uuid):
        pass

    def read(self):
        return Samples([0] * 8, [0] * 8, 0, None)

    def stop(self):
        return self.read()


@pytest.fixture
def played(monkeypatch):
    monkeypatch.setattr(probes, "device_uuid", lambda: None)
    monkeypatch.setattr(probes, "pinned_peak", lambda: None)
    device, clock = PlayedDevice(), PlayedClock()
    meter = Meter(device, clock, StillSampler())
    meter.start("init")
    yield meter, device, clock
    meter.stop()


def play_step(meter, device, clock, number, forward=(100, 60), backward=(200, 80), step=(300, 40)):
    meter.begin_step()
    for phase, levels, seconds in (("forward", forward, 1.0), ("backward", backward, 2.0), ("step", step, 3.0)):
        meter.switch(phase)
        device.move(*levels)
        clock.now += seconds
    meter.count(8, 1024)
    return meter.end_step(number, skipped=False)


def test_each_phase_keeps_its_own_peak(played):
    meter, device, clock = played
    device.move(500, 40)
    play_step(meter, device, clock, 1)
    record = Record()
    meter.write_to(record)
    assert {phase: memory.peak_bytes for phase, memory in record.phases.items()} == {
        "init": 500,
        "forward": 100,
        "backward": 200,
        "step": 300,
    }
    assert record.device.peak_bytes == 500
    assert record.device.peak_phase == "init"
    assert record.device.resident_bytes == 40
    assert record.phases["backward"].end_bytes == 80


def test_a_phase_begins_at_the_level_that_the_last_one_left(played):
    meter, device, clock = played
    play_step(meter, device, clock, 1, forward=(100, 90), backward=(10, 10), step=(5, 5))
    record = Record()
    meter.write_to(record)
    assert record.phases["backward"].peak_bytes == 90


def test_the_peak_of_a_step_is_that_of_its_phases_and_steady_leaves_the_first_out(played):
    meter, device, clock = played
    assert play_step(meter, device, clock, 1, step=(999, 40)).peak_bytes == 999
    assert play_step(meter, device, clock, 2).peak_bytes == 300
    record = Record()
    meter.write_to(record)
    assert record.device.steady_peak_bytes == 300
    assert record.device.peak_bytes == 999


def test_an_evaluation_inside_training_is_its_own_phase_and_untimed(played):
    meter, device, clock = played
    play_step(meter, device, clock, 1)
    meter.enter("eval")
    device.move(700, 40)
    clock.now += 100
    meter.leave()
    play_step(meter, device, clock, 2)
    record = Record()
    meter.write_to(record)
    assert record.phases["eval"].peak_bytes == 700
    assert record.phases["step"].peak_bytes == 300
    assert [step.seconds for step in record.steps] == [6.0, 6.0]


def test_time_between_steps_belongs_to_the_step_that_follows(played):
    meter, device, clock = played
    play_step(meter, device, clock, 1)
    clock.now += 0.5  # loading data, logging
    play_step(meter, device, clock, 2)
    record = Record()
    meter.write_to(record)
    assert [step.seconds for step in record.steps] == [6.0, 6.5]
    assert record.phases["backward"].seconds == 2.0


def test_speed_is_the_median_after_the_warm_up(played):
    meter, device, clock = played
    for number in range(1, 21):
        clock.now += 100 if number <= 5 else 0
        play_step(meter, device, clock, number)
    record = Record()
    meter.write_to(record)
    assert num_warmup_steps(20) == record.speed.num_warmup_steps == 5
    assert record.speed.step_seconds == 6.0
    assert record.speed.samples_per_second == pytest.approx(8 / 6)
    assert record.speed.tokens_per_second == pytest.approx(1024 / 6)


def test_every_mark_is_given_back_but_the_running_one(played):
    meter, device, clock = played
    for number in range(1, 4):
        play_step(meter, device, clock, number)
    # Per step: its start, and one mark for each of its three phases. The last end is still in use.
    assert len(clock.released) == 3 * 4
    assert len({id(mark) for mark in clock.released}) == 3 * 4


def test_pausing_keeps_what_others_do_out_of_the_figures(played):
    meter, device, clock = played
    play_step(meter, device, clock, 1)
    meter.pause()
    device.move(10_000, 40)
    clock.now += 50
    meter.resume()
    play_step(meter, device, clock, 2)
    record = Record()
    meter.write_to(record)
    assert record.device.peak_bytes == 300
    assert [step.seconds for step in record.steps] == [6.0, 6.0]


def test_a_reset_by_somebody_else_is_caught_with_its_caller_and_loses_nothing(played, monkeypatch):
    meter, device, clock = played
    device.move(500, 40)
    # What deepspeed.initialize and the TrainerMemoryTracker call; the guard of the meter is around it.
    monkeypatch.setattr(torch._C, "_cuda_resetPeakMemoryStats", lambda index: device.reset(), raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_get_device_index", lambda *args, **kwargs: 0)
    torch.cuda.reset_peak_memory_stats()
    assert device.peak == 40
    play_step(meter, device, clock, 1)
    record = Record()
    meter.write_to(record)
    assert record.phases["init"].peak_bytes == 500
    assert [(reset.caller.split(".")[-1], reset.phase, reset.count) for reset in record.resets] == [
        ("test_a_reset_by_somebody_else_is_caught_with_its_caller_and_loses_nothing", "init", 1)
    ]


def test_the_guard_leaves_torch_as_it_found_it(monkeypatch):
    before = torch.cuda.reset_peak_memory_stats, torch.cuda.memory.reset_peak_memory_stats
    meter = Meter(PlayedDevice(), PlayedClock(), StillSampler())
    meter.start("init")
    assert torch.cuda.reset_peak_memory_stats is not before[0]
    meter.stop()
    assert (torch.cuda.reset_peak_memory_stats, torch.cuda.memory.reset_peak_memory_stats) == before


# ---- the real sampler -----------------------------------------------------------------------------------------------


def wait_until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end and not condition():
        time.sleep(0.01)
    assert condition()


def test_the_sampler_sees_memory_that_comes_and_goes_in_the_phase_that_it_was_told():
    sampler = HostSampler(interval=0.005)
    try:
        sampler.set_phase(0)
        wait_until(lambda: sampler.read().num_samples > 5)
        sampler.set_phase(1)
        block = torch.ones(64 * 2**20, dtype=torch.uint8)
        count = sampler.read().num_samples
        wait_until(lambda: sampler.read().num_samples > count + 5)
        del block
        gc.collect()
        peaks = sampler.read().host_peaks
        # 64 MiB were touched; the allocator may have had a few pages of them before.
        assert peaks[1] - peaks[0] > 56 * 2**20
    finally:
        sampler.stop()
    assert not sampler.alive()


def test_the_sampler_counts_children_without_counting_shared_pages_twice():
    sampler = HostSampler(interval=0.005)
    child = None
    try:
        sampler.set_phase(0)
        wait_until(lambda: sampler.read().num_samples > 5)
        alone = sampler.read().host_peaks[0]
        code = "import time; block = bytearray(96 * 2**20); print('ready', flush=True); time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "ready\n"
        wait_until(lambda: sampler.read().host_peaks[0] - alone > 90 * 2**20)
        assert sampler.read().host_peaks[0] - alone < 140 * 2**20  # the block, an interpreter, and no second copy
    finally:
        sampler.stop()
        if child is not None:
            child.kill()
            child.communicate()


def test_the_sampler_ends_when_the_process_that_it_watches_is_killed():
    code = (
        "import os, signal; from zerolab.host_sampler import HostSampler; s = HostSampler(); s.set_phase(0);"
        "print(s._process.pid, flush=True); import time; time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    pid = int(done.stdout)
    import psutil

    def gone():
        return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

    wait_until(gone)


# ---- steps that are not looked at phase by phase ----------------------------------------------------------------


def play_until(meter, device, clock, last):
    for number in range(len(meter.steps) + 1, last + 1):
        play_step(meter, device, clock, number)


def test_only_the_first_steps_and_one_in_an_interval_are_detailed(played):
    meter, device, clock = played
    play_until(meter, device, clock, 2 * DETAIL_INTERVAL + 1)
    detailed = [step.step for step in meter.steps if step.peak_bytes is not None]
    assert detailed == [*range(1, FIRST_DETAILED_STEPS + 1), DETAIL_INTERVAL + 1, 2 * DETAIL_INTERVAL + 1]


def test_a_peak_between_detailed_steps_is_kept_said_and_followed_up(played):
    meter, device, clock = played
    play_until(meter, device, clock, FIRST_DETAILED_STEPS + 2)
    play_step(meter, device, clock, len(meter.steps) + 1, backward=(5000, 80))
    play_until(meter, device, clock, DETAIL_INTERVAL + 2)
    record = Record()
    meter.write_to(record)
    assert record.device.peak_bytes == 5000
    assert "5,000 bytes" in record.warnings[0]
    assert meter.steps[DETAIL_INTERVAL + 1].peak_bytes is not None  # looked at again, since something was new


def test_a_peak_between_detailed_steps_that_is_known_leaves_the_phases_alone(played):
    meter, device, clock = played
    play_until(meter, device, clock, DETAIL_INTERVAL + 2)
    record = Record()
    meter.write_to(record)
    peaks = {phase: record.phases[phase].peak_bytes for phase in ("forward", "backward", "step")}
    assert peaks == {"forward": 100, "backward": 200, "step": 300}
    assert record.warnings == []


def test_a_run_that_ends_between_detailed_steps_has_its_peak(played):
    meter, device, clock = played
    play_until(meter, device, clock, FIRST_DETAILED_STEPS + 1)
    play_step(meter, device, clock, len(meter.steps) + 1, forward=(7000, 60))
    record = Record()
    meter.write_to(record)
    assert record.device.peak_bytes == 7000


def test_every_step_is_detailed_on_request(monkeypatch):
    monkeypatch.setattr(probes, "device_uuid", lambda: None)
    device, clock = PlayedDevice(), PlayedClock()
    meter = Meter(device, clock, StillSampler(), every_step=True)
    meter.start("init")
    play_until(meter, device, clock, DETAIL_INTERVAL)
    assert all(step.peak_bytes == 300 for step in meter.steps)
    meter.stop()
