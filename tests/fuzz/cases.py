"""Plan of the damage that is done to folders, and of the tools that read them; the same for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.fuzz import damaged_files, damaged_values, hostile_files
from tests.fuzz.inputs import RUNS, SCALED
from tests.fuzz.scene import Mutation
from tests.fuzz.targets import TARGETS, Target

_MODULES = (damaged_files, damaged_values, hostile_files)
_EVERYWHERE = [mutation for module in _MODULES for mutation in module.MUTATIONS]
_RUNS = [*_EVERYWHERE, *(mutation for module in _MODULES for mutation in module.RUN_MUTATIONS)]


def mutations_of(subject: str) -> list[Mutation]:
    """Return the damage that can be done to a folder."""
    if subject in SCALED:
        scaled = damaged_values.SCALED_MUTATIONS
        return [*_EVERYWHERE, *hostile_files.SAFETENSORS_MUTATIONS, *scaled]
    if subject not in RUNS:
        return [*_EVERYWHERE, *hostile_files.SAFETENSORS_MUTATIONS]
    return _RUNS if RUNS[subject]["stage"] == 0 else [*_RUNS, *damaged_files.SHARDED_MUTATIONS]


MUTATIONS = {mutation.__name__: mutation for subject in TARGETS for mutation in mutations_of(subject)}


@dataclass(frozen=True)
class Case:
    """One damaged input and the tool that gets it."""

    number: int
    subject: str
    mutation: str
    target: str
    seed: int


def plan(count: int, seed: int) -> list[Case]:
    """Return the first `count` cases: all damage about equally often, on changing subjects and tools."""
    rng = random.Random(seed)
    subjects = [(subject, target) for subject, targets in TARGETS.items() for target in targets]
    cases: list[Case] = []
    while len(cases) < count:
        for name in rng.sample(list(MUTATIONS), len(MUTATIONS)):
            fitting = [pair for pair in subjects if MUTATIONS[name] in mutations_of(pair[0])]
            subject, target = rng.choice(fitting)
            cases.append(Case(len(cases), subject, name, target, rng.randrange(1 << 32)))
    return cases[:count]


def target_of(case: Case) -> Target:
    """Return the tool of a case."""
    return TARGETS[case.subject][case.target]


def kind_of(mutation: str) -> str:
    """Return the file in which a mutation is."""
    return MUTATIONS[mutation].__module__.rpartition(".")[2]
