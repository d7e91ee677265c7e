"""Runs functions side by side of which one runs at a time, and all come to the same stations in the same order.

Each function runs in a thread of its own. Whoever comes to a station hands on to the next one; the last hands back to the first,
which goes on to the next station. So what is done at a station for all of them is done once: a *lap*.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Stopped(Exception):  # noqa: N818 - like GeneratorExit, it ends a function and is no error of its own
    """Raised at a station in the functions that are ended because another one failed.

    No BaseException: torch calls a module's hooks for what failed only after an Exception. Whoever swallows it gets it again at the
    next station.
    """


class Course(Protocol):
    """What happens between the functions; every call is made while no other function runs."""

    def leave(self, runner: int) -> None:
        """The function is about to stand still, or has ended."""
        ...

    def resume(self, runner: int) -> None:
        """The function is about to run."""
        ...

    def arrive(self, runner: int, station: Any) -> None:
        """It came to a station (None: its end).

        Raises:
            Exception: others are elsewhere.
        """
        ...

    def lap(self, station: Any) -> None:
        """All have come to this station."""
        ...


class Relay:
    """One run of several functions.

    Args:
        functions: what to run.
        course: told of everything.
        name: of the threads.
    """

    def __init__(
        self, functions: Sequence[Callable[[], Any]], course: Course, *, name: str
    ) -> None:
        self._functions = functions
        self._course = course
        self._name = name
        self._turns = [threading.Semaphore(0) for _ in functions]
        self._threads: list[threading.Thread] = []
        self._ended = [False] * len(functions)
        self._results: list[Any] = [None] * len(functions)
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._local = threading.local()

    def run(self) -> list[Any]:
        """Run all to their end; no thread is left afterwards.

        Returns:
            What the functions returned.

        Raises:
            BaseException: the first that a function raised; the others were ended at their station.
        """
        while not self._come_to_an_end():
            pass
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return self._results

    def station(self, station: Any) -> None:
        """Called by a function: wait here until it is this one's turn again.

        Raises:
            Stopped: another one failed.
        """
        runner: int = self._local.runner
        self._check()
        self._course.arrive(runner, station)
        self._course.leave(runner)
        self._hand_on((runner + 1) % len(self._functions))
        self._turns[runner].acquire()
        self._check()
        self._course.resume(runner)
        if runner == 0:
            self._course.lap(station)

    @property
    def is_running(self) -> bool:
        """Whether the calling thread is one of the run's."""
        return hasattr(self._local, "runner")

    def _come_to_an_end(self) -> bool:
        try:
            if not self._threads:
                self._hand_on(0)
            self._over.wait()
            for thread in self._threads:
                thread.join()
        except BaseException as error:  # noqa: BLE001 - an interrupt: the functions end at their next stations
            self._fail(error)
            return False
        return True

    def _check(self) -> None:
        if self._failure is not None:
            raise Stopped

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error

    def _hand_on(self, runner: int) -> None:
        """Let another one run: started now if it has not been, the next that has not ended otherwise."""
        order = [(runner + i) % len(self._functions) for i in range(len(self._functions))]
        for number in order:
            if number < len(self._threads):
                if not self._ended[number]:
                    self._turns[number].release()
                    return
            elif self._failure is None and self._start(number):
                return
        self._over.set()

    def _start(self, number: int) -> bool:
        """Start a function; False where there is no thread for it."""
        thread = threading.Thread(
            target=self._serve, args=(number,), name=f"{self._name} {number}", daemon=True
        )
        self._threads.append(thread)
        try:
            thread.start()
        except BaseException as error:  # noqa: BLE001 - no more threads, or an interrupt while one begins
            self._fail(error)
            if thread not in threading.enumerate():
                self._threads.remove(thread)
                return False
        return True

    def _serve(self, runner: int) -> None:
        self._local.runner = runner
        try:
            self._course.resume(runner)
            try:
                self._results[runner] = self._functions[runner]()
                self._check()
                self._course.arrive(runner, None)
            finally:
                self._course.leave(runner)
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self._fail(error)
        self._ended[runner] = True
        self._hand_on((runner + 1) % len(self._functions))
