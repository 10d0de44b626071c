"""The optimum of a tiny problem, by trying everything: nothing here is shared with the planners."""

from __future__ import annotations

from lightning_spindle.planner import PlanningProblem


def optimum_ms(problem: PlanningProblem, above_ms: float) -> float:
    """The least makespan of any schedule, or ``above_ms`` where none is below it.

    Depth first over time. Some optimal schedule starts layers only at time 0 and at ends of others;
    at each such moment every choice of idle MetaOps and allocations is tried, waiting included.
    A state met before, no later, is not looked at again.
    """
    ops = problem.metaops
    index = {m.name: i for i, m in enumerate(ops)}
    before = [[index[b] for b in m.after] for m in ops]
    options = [[(n, t.total_ms) for n, t in m.times if n <= problem.devices] for m in ops]
    fastest = [min(t for _, t in o) for o in options]
    leanest = [min(n * t for n, t in o) for o in options]
    best = above_ms
    seen: dict[object, float] = {}

    def least_ms(now, left, running):
        ends = [0.0] * len(ops)
        area = 0.0
        for i in range(len(ops)):
            busy = [e for m, _, e in running if m == i]
            start = busy[0] if busy else now
            ends[i] = max([start, *(ends[b] for b in before[i])]) + left[i] * fastest[i]
            area += left[i] * leanest[i]
        area += sum(n * (e - now) for _, n, e in running)
        return max(now + area / problem.devices, *ends)

    def starts(m, left, running, free):
        """Every way to start layers of MetaOps m and later ones now."""
        if m == len(ops):
            yield ()
            return
        yield from starts(m + 1, left, running, free)
        idle = left[m] > 0 and all(i != m for i, _, _ in running)
        ready = all(left[b] == 0 and all(i != b for i, _, _ in running) for b in before[m])
        if idle and ready:
            for n, t in options[m]:
                if n <= free:
                    for others in starts(m + 1, left, running, free - n):
                        yield ((m, n, t), *others)

    def visit(now, left, running):
        nonlocal best
        if not any(left) and not running:
            best = min(best, now)
            return
        if least_ms(now, left, running) >= best - 1e-9:
            return
        key = (left, tuple((m, n, round(e - now, 7)) for m, n, e in running))
        if seen.get(key, float("inf")) <= now + 1e-9:
            return
        seen[key] = now
        free = problem.devices - sum(n for _, n, _ in running)
        for started in sorted(starts(0, left, running, free), key=len, reverse=True):
            going = sorted([*running, *((m, n, now + t) for m, n, t in started)])
            if going:
                then = min(e for _, _, e in going)
                rest = list(left)
                for m, _, _ in started:
                    rest[m] -= 1
                visit(then, tuple(rest), [r for r in going if r[2] > then + 1e-9])

    visit(0.0, tuple(m.layers for m in ops), [])
    return best
