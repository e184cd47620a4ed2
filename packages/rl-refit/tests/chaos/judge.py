"""Whether what happened in a case is what must happen: a list of everything that is wrong with it, empty if clean.

Clocks enter once: nobody may need longer than the deadline, the liveness and `MARGIN_S`, which is as long as a busy
machine may take for anything.
"""

from __future__ import annotations

MARGIN_S = 30.0


def faults_of(case, outcome):
    wrong = [*_starts(case, outcome), *_survivors(case, outcome), *_engines(case, outcome), *_after(case, outcome)]
    if outcome["left"]:
        wrong.append(f"left in shared memory: {outcome['left']}")
    return wrong


def _starts(case, outcome):
    for name, said in (outcome["meet"] | outcome.get("first", {})).items():
        if "error" in said or "hang" in said or "dead" in said or "crashed" in said:
            yield f"{name} did not even begin: {said}"
        elif "weights" in said and said["weights"] != 1:
            yield f"{name} has weights {said['weights']} after the first refit"
    if not outcome["struck"] and case["fault"]["point"] != "none":
        yield "the fault never struck"


def _survivors(case, outcome):
    victim = case["fault"]["party"]
    for name, said in outcome["fault"].items():
        if "hang" in said:
            yield f"{name} hangs: {said['hang']}"
        elif "dead" in said or "crashed" in said:
            if name != victim or case["fault"]["action"] != "kill":
                yield f"{name} ended: {said}"
        elif "error" not in said and name in outcome["stopped"] and said.get("sink_version", 2) == 2:
            continue  # it slept while the others committed, and then heard that they had
        elif "error" not in said:
            yield f"{name} noticed nothing: {said}"
        else:
            yield from _error(case, name, said, is_victim=name == victim)
    for name, seconds in outcome["seconds"].items():
        if seconds > outcome["limit_s"] + MARGIN_S:
            yield f"{name} took {seconds:.1f} s"


def _error(case, name, said, *, is_victim):
    if is_victim and case["fault"]["action"] in ("raise", "interrupt"):
        own = {"raise": "ChaosError", "interrupt": "KeyboardInterrupt"}[case["fault"]["action"]]
        if said["error"] != own:
            yield f"{name} raised {said['error']}, not its own {own}: {said['message']}"
        return
    if is_victim and case["fault"]["action"] in ("stop", "close"):
        return  # it ended with an error: which one depends on how far the others were
    text = f"{said['message']} {said['peer']}"
    kinds = case["kinds"] or ["PeerError"]
    if said["error"] not in kinds:
        yield f"{name} raised {said['error']}, none of {kinds}: {said['message']}"
    for word in case["blame"]:
        if word not in text:
            yield f"{name} does not say {word!r}: {said['error']}: {text}"
    if said["phase"] is None or not said["notes"]:
        yield f"{name} does not say where it was: {said}"


def _engines(case, outcome):
    found = {}
    for name, said in outcome["fault"].items():
        if "poisoned" in said:
            state = _state(said)
            found[name] = state
            allowed = case["engines"]
            if name == case["fault"]["party"] and (name in outcome["stopped"] or case["fault"]["action"] == "close"):
                allowed = ["old", "new", "poisoned", "untouched"]
            if state not in allowed:
                yield f"{name} is {state}, none of {allowed}: {said}"
    if {"old", "new"} <= set(found.values()):
        yield f"engines differ: {found}"


def _state(said):
    if said["poisoned"]:
        return "poisoned"
    versions = (said["weights"], said["sink_version"])
    return {(1, 1): "old", (2, 2): "new", (-1, None): "untouched"}.get(versions, f"torn {versions}")


def _after(case, outcome):
    for name, said in outcome.get("broken", {}).items():
        if "broken" not in said.get("message", "") or "make a new Refit" not in said["message"]:
            yield f"{name} does not say that its transport is broken: {said}"
    for name, said in outcome.get("next", {}).items():
        if "error" in said or "dead" in said or "hang" in said or "crashed" in said:
            yield f"then {name} failed: {said}"
        elif "weights" in said and (said["weights"], said["sink_version"], said["poisoned"]) != (3, 3, False):
            yield f"then {name} has {said}"
