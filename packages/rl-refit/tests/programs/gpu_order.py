"""Which work of streams, in any process, touches the same memory with nothing that orders it.

The records of `fake_gpus` are read in the order of time, with a vector clock for each host and each stream: a wait, a
token, a key of a store or a message makes one follow the other. Of two that touch the same bytes, one of them writing,
one must follow the other.
"""

from collections import defaultdict


def races(events):
    """One line for each pair of works that nothing orders; empty where all is in order.

    Args:
        events: What all processes recorded.
    """
    clocks = defaultdict(lambda: defaultdict(int))  # agent → agent → how much of it is known to be over
    marks, said, works = {}, {}, {}
    touched = defaultdict(list)
    found = {}

    def follow(agent, clock):
        own = clocks[agent]
        for other, count in clock.items():
            own[other] = max(own[other], count)

    def touch(agent, what, accesses):
        clocks[agent][agent] += 1
        for memory, start, end, how in accesses:
            kept = []
            for before in touched[memory]:
                first, last, kind, other, count, earlier = before
                ordered = clocks[agent][other] >= count
                if start < last and first < end and "writes" in (how, kind) and not ordered:
                    line = f"{other}: {earlier} {kind}, and {agent}: {what} {how} {memory}"
                    found.setdefault(line, f"{line} from byte {max(start, first)}, and nothing orders them")
                if not (ordered and how == "writes" and start <= first and last <= end):
                    kept.append(before)  # what is overwritten later, and known to be over, tells nothing more
            touched[memory] = [*kept, (start, end, how, agent, clocks[agent][agent], what)]

    def free(memory):
        for _, _, kind, other, count, earlier in touched[memory]:
            if other.endswith(at("")) and clocks[at("host")][other] < count:  # torch waits for other processes itself
                line = f"{other}: {earlier} {kind}, and {at('host')} frees {memory}"
                found.setdefault(line, f"{line}, and nothing orders them")

    def at(name):
        return f"{name} of process {process}"

    for _, process, kind, *what in sorted(events, key=lambda event: event[0]):
        host = at("host")
        if kind == "run":
            stream, accesses, label = what
            follow(at(stream), clocks[host])
            touch(at(stream), label, accesses)
        elif kind == "record":
            stream, number = what
            follow(at(stream), clocks[host])
            clocks[at(stream)][at(stream)] += 1
            marks[process, number] = dict(clocks[at(stream)])
        elif kind == "over":
            follow(host, marks[process, *what])
        elif kind == "synchronize":
            for agent in [agent for agent in clocks if agent.endswith(f" of process {process}")]:
                follow(host, clocks[agent])
        elif kind == "say":
            clocks[host][host] += 1
            said.setdefault(what[0], dict(clocks[host]))
        elif kind == "hear":
            follow(host, said.get(what[0], {}))
        elif kind == "begin":
            stream, nccl, number, accesses, operation, message = what
            follow(at(nccl), clocks[host])
            if stream is not None:  # NCCL waits for what the current stream was given; gloo knows nothing of it
                follow(at(nccl), clocks[at(stream)])
            touch(at(nccl), operation, accesses)
            works[process, number] = dict(clocks[at(nccl)]), message, operation
            if operation == "send":
                said[message] = dict(clocks[at(nccl)])
        elif kind in ("ended", "waited"):
            clock, message, operation = works[process, what[1]]
            agent = host if kind == "ended" else at(what[0])
            follow(agent, clock)
            if operation == "recv":
                follow(agent, said.get(message, {}))  # of a process that died nothing is known
        elif kind == "aborted":
            follow(host, clocks[at(what[0])])
        elif kind == "free":
            free(what[0])
    return [*found.values()]
