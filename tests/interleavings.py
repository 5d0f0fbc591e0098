"""All interleavings of machines at one bucket: each stops at every request, and any other one may go on.

A machine is a function whose only communication are its requests, so it is known by the answers that it got so far. To let it make
its next request it runs from its beginning, on an empty disk, with these answers. So no thread is needed, and states that are equal
(the objects, and the answers of each machine) are looked at once, however many orders lead there.

A machine may die at any time: that is the state in which it is not run again. An answer may be lost, where a machine says so; then
the request happens at once, and once more at any later time.
"""

import shutil
from typing import NamedTuple

from bucket_store import Store


class _Paused(BaseException):
    """Ends a run of a machine before a request without an answer."""

    def __init__(self, request):
        self.request = request


class _LostError(Exception):
    """The answer to a request did not come."""


LOST = _LostError()


class Outcome(NamedTuple):
    """A machine after some answers: its next request, or what it returned or raised."""

    request: tuple | None
    result: object = None


class State(NamedTuple):
    """The objects, by name; the answers of each machine; and requests that may happen once more."""

    objects: tuple
    answers: tuple
    late: tuple


class Machine:
    """What one machine does.

    Args:
        name: of its disk.
        work: takes a function that gives it a client, and does its requests through that.
        num_lost: answers to its writes that may be lost.
    """

    def __init__(self, name, work, num_lost=0):
        self.name, self._work, self.num_lost, self._known = name, work, num_lost, {}

    def after(self, answers, disk):
        """The machine's next request after these answers, or its end."""
        if answers not in self._known:
            shutil.rmtree(disk / self.name, ignore_errors=True)
            self._known[answers] = self._run(answers)
        return self._known[answers]

    def _run(self, answers):
        left = list(answers)

        class Client(Store):
            def request(self, operation, name, **given):
                if not left:
                    raise _Paused((operation, name, tuple(sorted(given.items()))))
                answer = left.pop(0)
                if isinstance(answer, Exception):
                    raise answer
                return {path: dict(facts) for path, facts in answer} if operation == "list" else answer

        try:
            return Outcome(None, self._work(Client()))
        except _Paused as paused:
            return Outcome(paused.request)
        except Exception as error:
            return Outcome(None, error)


def explore(machines, objects, check, disk, restore):
    """Calls `check(objects, outcomes)` in every state that can be reached; the number of these states.

    Args:
        machines: that run at the same time.
        objects: of the bucket at the start, by name.
        check: raises where a state is wrong; gets the objects and, by machine, the outcome so far.
        disk: a folder for the machines' disks.
        restore: is called before a machine runs, to forget what the process knows of another one.
    """
    start = State(tuple(sorted(objects.items())), ((),) * len(machines), ())
    seen, waiting = {start}, [start]
    while waiting:
        state = waiting.pop()
        outcomes = []
        for machine, answers in zip(machines, state.answers, strict=True):
            restore(machine.name)
            outcomes.append(machine.after(answers, disk))
        check(dict(state.objects), dict(zip((machine.name for machine in machines), outcomes, strict=True)))
        for following in _following(state, machines, outcomes):
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return len(seen)


def _following(state, machines, outcomes):
    for number, request in enumerate(state.late):
        yield state._replace(objects=_applied(state.objects, request)[0], late=state.late[:number] + state.late[number + 1 :])
    for number, (machine, outcome) in enumerate(zip(machines, outcomes, strict=True)):
        if outcome.request is None:
            continue
        objects, answer = _applied(state.objects, outcome.request)
        yield state._replace(objects=objects, answers=_with(state.answers, number, answer))
        num_lost = sum(one is LOST for one in state.answers[number])
        if outcome.request[0] in ("put", "remove") and num_lost < machine.num_lost:
            lost = _with(state.answers, number, LOST)
            yield state._replace(objects=objects, answers=lost, late=(*state.late, outcome.request))
            yield state._replace(answers=lost, late=(*state.late, outcome.request))


def _applied(objects, request):
    """The objects after a request, and the answer to it."""
    operation, name, given = request
    store = Store(objects)
    try:
        answer = store.apply(operation, name, **dict(given))
    except (FileExistsError, FileNotFoundError) as error:
        return objects, _errors.setdefault((type(error), name), error)
    after = tuple(sorted(store.objects.items()))
    if operation == "list":
        answer = tuple(sorted((path, tuple(sorted(facts.items()))) for path, facts in answer.items()))
    return after, answer if operation in ("list", "get") else None


_errors = {}
"""One of each kind and name, so that equal answers are equal."""


def _with(answers, number, answer):
    return (*answers[:number], (*answers[number], answer), *answers[number + 1 :])
