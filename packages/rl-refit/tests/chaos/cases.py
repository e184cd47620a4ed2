"""The cases of chaos: who fails, where, how; and what must have become of everybody else.

A case is plain data, so that it travels as JSON. `expect` says, for who survives:

    blame      words of which each must stand in every survivor's error, or in its `peer`: who is to blame, or why
    kinds      error classes that it may be
    engines    what a surviving engine may be: "old" and "new" weights, bit for bit, or "poisoned"
    next       "same": the next refit of the same objects succeeds; "fresh": so does one of fresh processes in place of
               the dead; "broken": the next one says that the transport is broken, and a fresh one succeeds;
               "either": one of these, since nobody knows how far the others are
"""

from __future__ import annotations

PATIENCE_S = 60.0  # what nothing waits for may be as long as this, however busy the machine is
SLOW_ACTIONS = ("stop", "close", "lose")
"""What is noticed because somebody is silent, or something does not come; whatever else happens is noticed at once.

Their times are such that a heart that beats some seconds late is not taken for a dead one."""

ENDED_BY_DEADLINE = ("lose", "drop", "duplicate", "reorder")
"""What may leave somebody waiting for what never comes, while all are alive."""

MODES = ("staged", "swap")
WIRES = ("ring", "messages")
TRANSPORTS = ("arena", *WIRES)

BEFORE_BYTES = ("source is asked for its manifest", "sink prepares", "before 'prepared' is said", "transfer begins")
BREAKING = ("piece leaves", "sink stages")
UNDECIDED = {
    "source": ("transfer is over", "source is digested", "before 'verified' is said"),
    "sink": ("transfer is over", "sink is digested", "before 'verified' is said"),
}


def case(kind, name, fault, **more):
    """With the defaults of all cases; `fault` is (party, point, action) or (party, point, action, nth)."""
    party, point, action, *nth = fault
    made = {
        "kind": kind,
        "transport": "ring",
        "mode": "staged",
        "sources": 1,
        "sinks": 1,
        "store": "sink",
        "deadline_s": 20.0 if action in ENDED_BY_DEADLINE else PATIENCE_S,
        "liveness_s": 10.0 if action in SLOW_ACTIONS else PATIENCE_S,
        "fault": {"party": party, "point": point, "action": action, "nth": nth[0] if nth else 0},
        "blame": [party],
        "kinds": [],
        "engines": ["old"],
        "next": None,
    } | more
    made["fault"] |= made.pop("fault_more", {})
    world = f"{made['sources']}to{made['sinks']}{' colocated' if made.get('colocated') else ''}"
    made["name"] = f"{kind}: {name} [{made['transport']} {made['mode']} {world}, store at the {made['store']}]"
    return made


def deaths():
    """Every process, at every bucket and every border of a phase, dies or stops."""
    for action in ("kill", "stop"):
        verb = {"kill": "dies", "stop": "stops"}[action]
        after = {"next": "fresh" if action == "kill" else "either"}
        for party, other in (("source 0", "sink"), ("sink 0", "sink"), ("sink 1", "sink")):
            side = party.split()[0]
            kind = f"{side} {verb}"
            world = {"sinks": 2} if side == "sink" else {}
            store = {"store": "trainer"} if side == "sink" else {"store": other}
            early = [p for p in BEFORE_BYTES if side in p or p.split()[0] not in ("source", "sink")]
            for point in early:
                yield case(kind, f"{party}, {point}", (party, point, action), **world, **store, **after)
            for bucket in range(6):
                point = "bucket leaves" if side == "source" else "sink stages"
                nth = bucket if side == "source" else 2 * bucket
                yield case(kind, f"{party}, bucket {bucket}", (party, point, action, nth), **world, **store, **after)
            for point in UNDECIDED[side]:
                yield case(kind, f"{party}, {point}", (party, point, action), **world, **store, **after)


def deaths_elsewhere():
    """The same in other modes and over other transports, at fewer points."""
    for transport in TRANSPORTS:
        for mode in MODES:
            for action in ("kill", "stop"):
                verb = {"kill": "dies", "stop": "stops"}[action]
                more = {"transport": transport, "mode": mode, "next": "fresh" if action == "kill" else "either"}
                yield case(
                    f"source {verb}",
                    "source 0, piece 5",
                    ("source 0", "piece leaves", action, 5),
                    **more,
                    engines=["old"],
                )
                yield case(
                    f"source {verb}",
                    "source 1, before 'verified' is said",
                    ("source 1", "before 'verified' is said", action),
                    **more,
                    sources=2,
                    sinks=2,
                    engines=["old"],
                )
                yield case(
                    f"sink {verb}",
                    "sink 1, piece 3",
                    ("sink 1", "sink stages", action, 3),
                    **more,
                    sinks=2,
                    engines=["old"],
                )


def planning():
    """Somebody dies or stops before the first refit, while all plan it and open their transport."""
    for transport in TRANSPORTS:
        for action in ("kill", "stop"):
            for party, point in (
                ("source 0", "source is asked for its manifest"),
                ("sink 1", "sink prepares"),
                ("sink 0", "before 'opened' is said"),
                ("sink 1", "'plan' is known"),
                ("source 0", "'opened' is said"),
            ):
                yield case(
                    f"{'dies' if action == 'kill' else 'stops'} while all plan",
                    f"{party}, {point}",
                    (party, point, action),
                    transport=transport,
                    sinks=2,
                    first=False,
                    engines=["untouched"],
                    next="fresh" if action == "kill" else "either",
                )


def store_host():
    """The process that hosts the store dies or stops: everybody's meeting point goes with it."""
    for action in ("kill", "stop"):
        kind = f"store's host {'dies' if action == 'kill' else 'stops'}"
        after = {"next": "fresh" if action == "kill" else "either"}
        for point in ("sink prepares", "sink stages", "sink is digested", "before 'verified' is said"):
            states = ["old", "poisoned"] if "verified" in point else ["old"]  # the other may have voted
            yield case(kind, f"sink 0, {point}", ("sink 0", point, action), sinks=2, engines=states, **after)
        for point in ("source is asked for its manifest", "piece leaves", "source is digested"):
            yield case(kind, f"source 0, {point}", ("source 0", point, action), store="trainer", **after)
        for transport in TRANSPORTS:
            fault = ("sink 0", "transfer begins", action)
            yield case(kind, "sink 0, transfer begins", fault, transport=transport, sinks=2, **after)
        yield case(
            kind,
            "sink 0, 'verified' is said",
            ("sink 0", "'verified' is said", action),
            sinks=2,
            engines=["old", "poisoned", "new"],
            **after,
        )


def in_doubt():
    """Somebody dies between verify and commit, when some may have committed."""
    for action in ("kill", "stop"):
        verb = "dies" if action == "kill" else "stops"
        for sinks in (1, 2):
            for mode in MODES:
                old = ["old"]
                more = {"sinks": sinks, "mode": mode, "next": "fresh" if action == "kill" else "either"}
                kind = f"leader {verb} between verify and commit"
                yield case(
                    kind,
                    "before it decides",
                    ("source 0", "'verified' is said", action),
                    **more,
                    engines=old,
                )
                yield case(
                    kind, "after it decided", ("source 0", "the decision is made", action), **more, engines=["new"]
                )
        kind = f"leader {verb} between verify and commit"
        after = {"next": "fresh" if action == "kill" else "either"}
        yield case(
            kind,
            "before it decides, and the store with it",
            ("source 0", "'verified' is said", action),
            store="trainer",
            sinks=2,
            engines=["poisoned"] if action == "kill" else ["old", "poisoned"],
            **after,
        )
        yield case(
            kind,
            "before it decides, and the store with it",
            ("source 0", "'verified' is said", action),
            store="trainer",
            engines=["old"],
            **after,
        )
        yield case(
            kind,
            "after it decided, and the store with it",
            ("source 0", "the decision is made", action),
            store="trainer",
            sinks=2,
            engines=["poisoned", "new"],
            **after,
        )
        kind = f"sink {verb} between verify and commit"
        for point in ("'verified' is said", "the decision is known", "sink commits"):
            for store in ("sink", "trainer"):
                yield case(
                    kind,
                    f"sink 1, {point}",
                    ("sink 1", point, action),
                    sinks=2,
                    store=store,
                    engines=["old", "new"] if point == "'verified' is said" else ["new"],
                    kinds=["PeerError", "RefitError"],
                    **after,
                )
        yield case(
            f"sink {verb} in its commit",
            "sink 1, sink has committed",
            ("sink 1", "sink has committed", action),
            sinks=2,
            engines=["new"],
            kinds=["PeerError", "RefitError"],
            **after,
        )
        yield case(
            f"sink {verb} in its commit",
            "sink 1, while it takes the weights",
            ("sink 1", "engine takes the weights", action),
            sinks=2,
            engines=["new"],
            kinds=["PeerError", "RefitError"],
            **after,
        )


def wire():
    """What a wire may do to bytes and messages."""
    for transport in TRANSPORTS:
        for mode in MODES:
            more = {"transport": transport, "mode": mode, "engines": ["old"]}
            same = {**more, "next": "same"}
            digest = {"kinds": ["DigestError"], "blame": ["tensors are not staged as source 0 sent them"]}
            yield case("bit flips", "in piece 5", ("sink 0", "sink stages", "flip", 5), **same, **digest)
            yield case("contents exchanged", "two layers", ("source 0", "contents", "contents"), **same, **digest)
            yield case(
                "piece lost",
                "the third is not staged",
                ("sink 0", "sink stages", "lose", 3),
                **same,
                blame=["not staged"],
                kinds=["RefitError", "DigestError"],
            )
            yield case(
                "piece twice",
                "the third is staged again",
                ("sink 0", "sink stages", "duplicate", 3),
                **more,
                next="broken" if transport == "messages" else "same",
                blame=["staged a second time"],
                kinds=["RefitError"],
            )
    for transport in WIRES:
        for action in ("drop", "duplicate", "reorder"):
            yield case(
                f"bucket {action}",
                "bucket 2 on the wire",
                ("source 0", "message", action, 2),
                transport=transport,
                mode="staged",
                kinds=["RefitError", "DeadlineError", "PeerError"],
                blame=["bucket"],
                next="same" if transport == "ring" else "broken",
            )


def raising():
    """A source, a sink or an engine raises; somebody presses Ctrl-C."""
    for action, word in (("raise", "ChaosError"), ("interrupt", "KeyboardInterrupt")):
        for transport in TRANSPORTS if action == "raise" else ("ring", "messages"):
            for party, point, nth in (
                ("source 0", "source is asked for its manifest", 0),
                ("source 0", "piece leaves", 5),
                ("source 0", "source is digested", 0),
                ("sink 0", "sink prepares", 0),
                ("sink 0", "sink stages", 4),
                ("sink 0", "sink is digested", 0),
                ("sink 0", "before 'verified' is said", 0),
                ("source 0", "'verified' is said", 0),
            ):
                after = "same"
                if transport == "messages" and point in (*BREAKING, "source is digested"):
                    after = "broken" if point in BREAKING else "either"
                for mode in MODES if action == "raise" else ("staged",):
                    yield case(
                        f"{action} in a {party.split()[0]}",
                        f"{party}, {point}",
                        (party, point, action, nth),
                        transport=transport,
                        mode=mode,
                        blame=[word],
                        kinds=["AbortedError"],
                        engines=["old"],
                        next=after,
                    )
        for sinks in (1, 2):
            yield case(
                f"{action} in a commit",
                "sink 0, sink commits",
                ("sink 0", "sink commits", action),
                sinks=sinks,
                blame=[word],
                kinds=["RefitError"],
                engines=["old", "poisoned", "new"] if sinks == 1 else ["poisoned", "new"],
                next="same",
            )
            yield case(
                f"{action} in a commit",
                "sink 0, while the engine takes the weights",
                ("sink 0", "engine takes the weights", action),
                sinks=sinks,
                blame=[word],
                kinds=["RefitError"],
                engines=["poisoned"] if sinks == 1 else ["poisoned", "new"],
                next="same",
            )
            yield case(
                f"{action} between verify and commit",
                "sink 0, the decision is known",
                ("sink 0", "the decision is known", action),
                sinks=sinks,
                blame=[word],
                kinds=["RefitError"],
                engines=["old", "new", "poisoned"],
                next="same",
            )
            yield case(
                f"{action} between verify and commit",
                "sink 0, 'verified' is said",
                ("sink 0", "'verified' is said", action),
                sinks=sinks,
                blame=[word],
                kinds=["RefitError", "AbortedError"],
                engines=["old", "new", "poisoned"],
                next="same",
            )


def disagreement():
    """The parties do not tell each other the same."""
    for how in ("rename", "shape", "dtype", "missing", "one more"):
        yield case(
            "manifest changed after planning",
            how,
            ("source 0", "call", how),
            sinks=2,
            blame=["manifest of the source is not the one that was planned", "make a new Refit"],
            kinds=["RefitError"],
        )
    for how in ("rename first", "shape first", "dtype first", "missing first"):
        yield case(
            "manifests do not fit",
            how,
            ("source 0", "none", how),
            sinks=2,
            first=False,
            blame=["5.weight" if how == "missing first" else "2.weight"],  # those behind it move up
            kinds=["CoverageError"],
            engines=["untouched"],
        )
    for party, settings, blame in (
        ("sink 0", {"bucket_bytes": 1024}, ["bucket_bytes 1024"]),
        ("source 1", {"bucket_bytes": 1024}, ["source 1", "bucket_bytes 1024"]),
        ("sink 0", {"transport": "arena"}, ["transport 'arena'"]),
        ("sink 0", {"num_sinks": 3}, ["num_sinks"]),
        ("source 0", {"num_sources": 1}, ["num_sources"]),
    ):
        yield case(
            "settings differ",
            f"{party} {settings}",
            (party, "none", "none"),
            sources=2,
            sinks=1,
            settings={party: settings},
            first=False,
            blame=blame,
            kinds=["RefitError", "PeerError"],
            engines=["untouched"],
        )
    for by in (1, -1):
        yield case(
            "versions differ",
            f"source 1 by {by}",
            ("source 1", "none", "version"),
            fault_more={"by": by},
            sources=2,
            blame=["version"],
            kinds=["RefitError"],
            next="same",
        )
    yield case(
        "version is not newer",
        "the same again",
        ("source 0", "none", "version"),
        fault_more={"by": -1},
        sinks=2,
        blame=["version 1 is not newer"],
        kinds=["RefitError"],
        next="same",
    )


def absence():
    """Somebody is not there, or leaves."""
    yield case("nobody calls", "source 0 dies before", ("source 0", "call", "kill"), next="fresh")
    yield case("nobody calls", "source 0 is stopped", ("source 0", "call", "stop"))
    yield case("nobody calls", "sink 1 dies before", ("sink 1", "call", "kill"), sinks=2, next="fresh")
    yield case("nobody calls", "sink 1 is stopped", ("sink 1", "call", "stop"), sinks=2, next="either")
    yield case("party leaves", "sink 1 closes", ("sink 1", "call", "close"), sinks=2, kinds=["PeerError", "RefitError"])
    yield case("party leaves", "source 0 closes", ("source 0", "call", "close"), kinds=["PeerError", "RefitError"])


def space():
    """There is no room for what a transport needs."""
    for transport in ("arena", "ring"):
        yield case(
            "shared memory is full",
            "source 0 may write 2 KiB",
            ("source 0", "none", "none"),
            transport=transport,
            settings={"source 0": {"file_bytes": 2048}},
            first=False,
            blame=["does not fit into"],
            kinds=["RefitError"],
            engines=["untouched"],
        )


def colocated():
    """Each process is a rank of the source and of the sink."""
    for action, kinds in (("kill", ["PeerError"]), ("stop", ["PeerError"]), ("raise", ["AbortedError"])):
        yield case(
            f"colocated: {action}",
            "process 1 in its second bucket",
            ("source 1", "bucket leaves", action, 1),
            sources=2,
            sinks=2,
            colocated=True,
            kinds=kinds,
            blame=["1"] if action != "raise" else ["ChaosError"],
            next={"kill": "fresh", "stop": "either", "raise": "same"}[action],
        )


def everything():
    """All cases, of unique names."""
    sets = (
        deaths,
        deaths_elsewhere,
        planning,
        store_host,
        in_doubt,
        wire,
        raising,
        disagreement,
        absence,
        space,
        colocated,
    )
    cases = {made["name"]: made for cases in sets for made in cases()}
    return list(cases.values())


def quick():
    """The first cases of every kind, over transports and modes in turn: a part of `everything` that has all kinds."""
    chosen = []
    by_kind = {}
    for made in everything():
        by_kind.setdefault(made["kind"], []).append(made)
    for turn, cases in enumerate(by_kind.values()):
        chosen += [cases[(turn * 7) % len(cases)], *([cases[len(cases) // 2]] if len(cases) > 4 else [])]
    return list({made["name"]: made for made in chosen}.values())
