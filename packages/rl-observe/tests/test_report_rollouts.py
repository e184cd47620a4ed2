"""Claims about the report's browser of recorded rollouts, in a real headless Chromium that is spoken to over a pipe."""

import itertools
import json
import os
import shutil
import subprocess
import time

import numpy as np
import pytest

from rl_observe import RunDirectory, write_report
from rl_observe.config import RecordedStepsConfig
from rl_observe.recorded_steps import StepRollouts
from rl_observe.report.rollouts import browsable
from rl_observe.step_recorder import StepRecorder

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="it needs Chromium, and none is installed here")
DEADLINE_S = 120  # of anything: another program may have the machine


class Page:
    """A page in a headless Chromium, by the DevTools protocol: JSON messages over two pipes, each ended by a zero."""

    def __init__(self, folder):
        ours, theirs = os.pipe(), os.pipe()
        self.errors, self._numbers, self._buffer = [], itertools.count(1), b""

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        # Chromium reads from descriptor 3 and writes to 4.
        command = f'exec "$@" 3<&{theirs[0]} 4>&{ours[1]}'
        self.process = subprocess.Popen(
            ["bash", "-c", command, "bash", CHROMIUM, *flags, "--remote-debugging-pipe",
             f"--user-data-dir={folder}/profile", "about:blank"],
            pass_fds=(theirs[0], ours[1]), stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(ours[1])
        os.close(theirs[0])
        self._reads, self._writes = ours[0], theirs[1]
        os.set_blocking(self._reads, False)
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask("Runtime.enable")

    _session = None

    def ask(self, method, **parameters):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            while b"\0" in self._buffer:
                line, self._buffer = self._buffer.split(b"\0", 1)
                told = json.loads(line)
                if told.get("method") == "Runtime.exceptionThrown":
                    self.errors.append(told["params"]["exceptionDetails"])
                if told.get("id") == number:
                    assert "error" not in told, told
                    return told["result"]
            try:
                self._buffer += os.read(self._reads, 1 << 20)
            except BlockingIOError:
                time.sleep(0.01)
        raise TimeoutError(method)

    def run(self, script):
        """The value of a script, which may await."""
        expression = f"(async () => {{ {script} }})()"
        found = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, path):
        self.ask("Page.enable")
        self.ask("Page.navigate", url=path.as_uri())
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            if self.run("return document.readyState === 'complete' && location.protocol === 'file:'"):
                return
            time.sleep(0.05)
        raise TimeoutError(str(path))

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._reads)
        os.close(self._writes)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    opened = Page(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


def recorded(path, *, steps, rollouts, length=12):
    """A run with recorded steps: every prompt has 4 responses, and occurs in every step."""
    run = RunDirectory.create(path)
    run.recipe.write_text("{}")
    rng = np.random.default_rng(0)
    recorder = StepRecorder(run, RecordedStepsConfig(last=steps), decode=lambda ids: f"w{ids[0]} ")
    for step in range(1, steps + 1):
        groups = np.arange(rollouts) // 4
        tokens = rng.integers(10, 60, (rollouts, length))
        tokens[:, :4] = 10 + np.stack([groups // 50**2 % 50, groups // 50 % 50, groups % 50, groups % 7], axis=1)
        lengths = rng.integers(6, length + 1, rollouts)
        places = np.arange(length)
        response = (places >= 4) & (places < lengths[:, None])
        logp_old = np.where(response, -rng.random((rollouts, length)), 0.0)
        recorder.record(
            "grpo",
            step,
            StepRollouts(
                tokens=tokens,
                lengths=lengths,
                response=response,
                logp_old=logp_old,
                logp=np.where(response, logp_old + 0.1, np.nan),
                rewards=np.arange(rollouts) / rollouts + step,
                advantage=np.where(response, np.where(np.arange(rollouts) % 2, 1.0, -1.0)[:, None], np.nan),
                clipped=response & (places == 5),
                groups=groups,
                truncated=np.arange(rollouts) % 10 == 0,
                sources=[f"rows.jsonl line {group}" for group in groups],
                prompts=[f"prompt {group} </script><b>" for group in groups],
            ),
        )
    recorder.close()
    assert not recorder.unwritten
    return run


SHOWN = "document.querySelector('.rollout-count').textContent"


def fill(name, value):
    """A script that fills one control in as a person does, and waits until the page has answered.

    The page waits 60 ms for the next key; its timer and the one here run in the order in which they are due.
    """
    return (
        f"{{ const one = document.querySelector('#browser [name={json.dumps(name)}]'); "
        f"one.value = {json.dumps(value)}; "
        "one.dispatchEvent(new Event('input', {bubbles: true})); await new Promise((done) => setTimeout(done, 200)); } "
    )


@needs_chromium
def test_rollouts_are_filtered_chosen_shaded_and_compared(tmp_path, page):
    page.open(write_report(recorded(tmp_path / "run", steps=3, rollouts=40)))
    assert page.run(f"return {SHOWN}") == "120 of 120 rollouts"
    assert page.run(fill("step", "1") + f"return {SHOWN}") == "40 of 120 rollouts"
    assert page.run(fill("reward-low", "2.5") + f"return {SHOWN}") == "20 of 120 rollouts"
    assert page.run(fill("advantage-high", "0") + f"return {SHOWN}") == "10 of 120 rollouts"
    cut_off = "document.querySelector('#browser [name=truncated]').click(); "
    assert page.run(cut_off + fill("length-low", "1") + f"return {SHOWN}") == "2 of 120 rollouts"
    page.run(cut_off + fill("length-low", "") + fill("advantage-high", "") + fill("reward-low", ""))
    assert page.run(f"return {SHOWN}") == "40 of 120 rollouts"
    longest = page.run(fill("length-low", "8") + f"return {SHOWN}")
    assert 0 < int(longest.split()[0]) < 40
    page.run(fill("length-low", "") + fill("step", "") + fill("order", "reward down"))
    first = "document.querySelector('.rollout-list .rollout')"
    assert "grpo 3" in page.run(f"return {first}.textContent")
    assert page.run(f"{first}.click(); return document.querySelectorAll('.rollout-detail i.tok').length") > 0
    backgrounds = {}
    for name in ("logp", "ratio", "advantage", "clip"):
        backgrounds[name] = page.run(
            fill("shade", name) + "return [...document.querySelectorAll('i.tok')].map((one) => one.style.background)"
        )
    assert len({json.dumps(each) for each in backgrounds.values()}) == 4
    assert sum("60%" in each for each in backgrounds["clip"]) == 1  # one token of each rollout is clipped
    group = page.run(fill("view", "group") + "return document.querySelectorAll('.rollout-card').length")
    assert group == 4
    over = page.run(
        fill("view", "steps") + "return [...document.querySelectorAll('.rollout-card')].map((one) => "
        "[one.textContent.slice(0, 6), one.querySelectorAll('ins, del').length])"
    )
    assert [each[0] for each in over] == ["grpo 1", "grpo 2", "grpo 3"]
    assert over[0][1] == 0 < over[1][1]
    assert not page.errors


@needs_chromium
def test_ten_thousand_rollouts_do_not_freeze_the_page(tmp_path, page):
    """However many rollouts there are, the document holds those in view: no task of the page grows with them."""
    page.open(write_report(recorded(tmp_path / "run", steps=4, rollouts=2500)))
    assert page.run(f"return {SHOWN}") == "10000 of 10000 rollouts"
    lines = "document.querySelectorAll('.rollout-list .rollout').length"
    assert page.run(f"return {lines}") < 60
    scrolled = page.run(
        "const list = document.querySelector('.rollout-list'); list.scrollTop = list.scrollHeight; "
        "while (!document.querySelector('.rollout-list [data-row=\"9999\"]')) "
        f"await new Promise((done) => setTimeout(done, 20)); return {lines}"
    )
    assert scrolled < 60
    assert page.run(fill("text", "prompt 624 ") + f"return {SHOWN}") == "16 of 10000 rollouts"
    page.run(fill("text", ""))
    # Clearing a filter looks at every rollout once, and opens no more of them: the document stays as small.
    assert page.run(f"return [{SHOWN}, {lines} < 60]") == ["10000 of 10000 rollouts", True]
    assert not page.errors


def test_a_page_holds_the_newest_rollouts_and_says_what_is_left_out(tmp_path, monkeypatch):
    run = recorded(tmp_path / "run", steps=3, rollouts=40)
    monkeypatch.setattr("rl_observe.report.rollouts.MAX_ROLLOUTS", 80)
    monkeypatch.setattr("rl_observe.report.rollouts.MAX_TOKENS", 480)
    data = browsable(run)
    assert data["steps"] == ["grpo 2", "grpo 3"]
    assert len(data["reward"]) == 80
    assert "1 older recorded steps are not on this page" in data["left_out"]
    assert "Of 1 older steps the page has no tokens" in data["left_out"]


def test_a_run_without_recorded_steps_has_no_browser(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    run.recipe.write_text("{}")
    assert browsable(run) is None
    assert 'id="browser"' not in write_report(run).read_text()
