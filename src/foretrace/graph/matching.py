"""Which collectives of several ranks are one: by process group, sequence number or order, kind and size.

Newer recordings tell group, members, size and sequence number of every collective. Older ones tell only the kernel's
name; then a group is the stream (or link) that its collectives run on, and the i-th call of a kind and size in a step
is the same one on all ranks. What this leaves over, because a rank lacks some calls, is matched by time in
`foretrace.graph.alignment`. Point-to-point transfers match by sender, receiver and order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from foretrace.arrays import Int64, Mask
from foretrace.errors import GraphError
from foretrace.graph.collectives import BEFORE, CollectiveCalls, What


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rank's part in a collective: index of the rank in the set, and of the call among that rank's calls."""

    rank: int
    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """One collective and its parts, by rank."""

    what: What
    members: tuple[Member, ...]
    present: int  # ranks of this set that belong to its group
    size: int  # ranks of the group, recorded or not

    @property
    def complete(self) -> bool:
        """Whether all ranks of the set that belong to the group take part."""
        return len(self.members) >= self.present


@dataclass(frozen=True, kw_only=True, eq=False)
class Matching:
    """Collectives of a set of ranks, and what could not be matched.

    `matches` are ordered by their first start. `left` holds, for every rank, the calls without a partner.
    `mismatches` and `missing` are sentences: calls that disagree, and what the set of recordings lacks.
    """

    calls: tuple[CollectiveCalls, ...]
    matches: tuple[Match, ...]
    mismatches: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the set, in the order in which they were given."""
        return tuple(each.rank for each in self.calls)

    @property
    def matched(self) -> int:
        """Collectives in which every recorded rank of their group takes part."""
        return sum(match.complete for match in self.matches)

    @cached_property
    def left(self) -> tuple[Int64, ...]:
        """Calls (indices) of every rank that belong to no match."""
        used = [np.zeros(len(each), dtype=np.bool_) for each in self.calls]
        for match in self.matches:
            for member in match.members:
                used[member.rank][member.call] = True
        return tuple(np.flatnonzero(~each) for each in used)

    @cached_property
    def flat(self) -> tuple[Int64, Int64, Int64]:
        """(match, rank, call) of every member, match by match."""
        rows = [(i, m.rank, m.call) for i, match in enumerate(self.matches) for m in match.members]
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2]

    @cached_property
    def starts(self) -> Int64:
        """Recorded start of every member, in the order of `flat`, ns on its rank's clock."""
        return self._of_calls([each.start for each in self.calls])

    @cached_property
    def ends(self) -> Int64:
        """Recorded end of every member, in the order of `flat`, ns on its rank's clock."""
        return self._of_calls([each.end for each in self.calls])

    def _of_calls(self, columns: Sequence[Int64]) -> Int64:
        _, rank, call = self.flat
        first = np.cumsum([0, *(len(c) for c in columns)])
        joined = np.concatenate([*columns, np.empty(0, np.int64)])
        times = joined[first[rank] + call]
        times.flags.writeable = False
        return times

    def unmatched(self) -> tuple[str, ...]:
        """Return every mismatch as a sentence: calls that disagree first, then calls that some ranks lack."""
        return (*self.mismatches, *self._lacking())

    def _lacking(self) -> Iterable[str]:
        """Yield sentences about matches that lack a rank and calls without a partner, alike ones counted together."""
        found: dict[tuple[str, str, tuple[int, ...]], list[int]] = defaultdict(list)
        for match in self.matches:
            if not match.complete:
                having = tuple(sorted(self.calls[m.rank].rank for m in match.members))
                start = min(int(self.calls[m.rank].start[m.call]) for m in match.members)
                found[match.what.kind, match.what.group_name, having].append(start)
        for calls, rows in zip(self.calls, self.left, strict=True):
            for row in rows.tolist():
                what = calls.what[row]
                present = self._present(what)
                if present > 1 or what.expects_partner(self.ranks):
                    found[what.kind, what.group_name, (calls.rank,)].append(int(calls.start[row]))
        for (kind, group, having), starts in sorted(found.items()):
            count = f"{len(starts)} x {kind}" if len(starts) > 1 else kind
            who = "rank" if len(having) == 1 else "ranks"
            yield (
                f"{count} of {group}: only {who} {', '.join(map(str, having))} recorded "
                f"{'them' if len(starts) > 1 else 'it'} (the first at {min(starts) / 1e6:.3f} ms)."
            )

    def _present(self, what: What) -> int:
        key = what.key
        return sum(key in each.groups for each in self.calls)


def match(calls: Sequence[CollectiveCalls]) -> Matching:
    """Match what is certain: by sequence number, or by order where all ranks made the same calls in a step.

    Raises GraphError where the recordings cannot be of one job: a rank twice, other world sizes, a process group that
    its own members describe differently.
    """
    _one_job(calls)
    calls = _same_channels(calls)
    _same_steps(calls)
    matches: list[Match] = []
    mismatches: list[str] = []
    by_step = _common_steps(calls)
    for key in sorted({key for each in calls for key in each.groups}, key=repr):
        having = [i for i, each in enumerate(calls) if key in each.groups]
        rows = {i: calls[i].groups[key] for i in having}
        numbered = all(bool(np.all(calls[i].sequence[rows[i]] >= 0)) for i in having)
        tokens = {i: _numbered(calls[i], rows[i]) if numbered else _ordered(calls[i], rows[i], by_step) for i in having}
        if not numbered:
            _drop_uneven(tokens)
        parts: dict[object, list[Member]] = defaultdict(list)
        for i in having:
            for token, call in tokens[i].items():
                parts[token].append(Member(rank=i, call=call))
        for members in parts.values():
            agreeing, sentence = _agreeing(calls, members)
            if sentence:
                mismatches.append(sentence)
            if len(agreeing) >= 2:
                matches.append(_match(calls, agreeing, len(having)))
    return Matching(
        calls=tuple(calls),
        matches=_in_order(calls, matches),
        mismatches=_counted(mismatches),
        missing=tuple(_missing(calls)),
    )


def with_matches(found: Matching, members: Iterable[Sequence[Member]]) -> Matching:
    """Return the matching with more collectives, given as their members."""
    calls = found.calls
    new = []
    for each in members:
        key = calls[each[0].rank].what[each[0].call].key
        new.append(_match(calls, list(each), sum(key in c.groups for c in calls)))
    return replace(found, matches=_in_order(calls, [*found.matches, *new]))


def without(found: Matching, dropped: Mask, sentences: Iterable[str]) -> Matching:
    """Return the matching without these matches (mask), each named in a sentence."""
    kept = tuple(m for m, drop in zip(found.matches, dropped.tolist(), strict=True) if not drop)
    return replace(found, matches=kept, mismatches=(*found.mismatches, *_counted(list(sentences))))


def _match(calls: Sequence[CollectiveCalls], members: list[Member], having: int) -> Match:
    what = calls[members[0].rank].what[members[0].call]
    ranks = {each.rank for each in calls}
    if what.peers:
        present = sum(peer in ranks for peer in what.peers)
        return Match(what=what, members=tuple(members), present=present, size=2)
    present = sum(member in ranks for member in what.members) if what.members else having
    size = len(what.members) or max(what.group_size, having)
    return Match(what=what, members=tuple(members), present=present, size=size)


def _in_order(calls: Sequence[CollectiveCalls], matches: Iterable[Match]) -> tuple[Match, ...]:
    return tuple(sorted(matches, key=lambda m: min(int(calls[p.rank].start[p.call]) for p in m.members)))


def _numbered(calls: CollectiveCalls, rows: Int64) -> dict[object, int]:
    """Return the token of every call of a group: its sequence number, and which of several with that number it is."""
    seen: Counter[object] = Counter()
    tokens: dict[object, int] = {}
    for row in rows.tolist():
        number = int(calls.sequence[row])
        tokens[number, seen[number]] = row
        seen[number] += 1
    return tokens


def _ordered(calls: CollectiveCalls, rows: Int64, by_step: bool) -> dict[object, int]:
    """Return the token of every call of a group: its step, kind and size, and its place among those alike.

    Calls before the first common step count backwards from it: where a recording begins is chance.
    """
    tokens: dict[object, int] = {}
    seen: Counter[object] = Counter()
    step = calls.step_number[rows] if by_step else np.zeros(len(rows), np.int64)
    listed = list(zip(rows.tolist(), step.tolist(), strict=True))
    before = [each for each in listed if each[1] == BEFORE]
    for row, number in [*before[::-1], *(each for each in listed if each[1] != BEFORE)]:
        alike = (number, calls.what[row].signature)
        tokens[alike, seen[alike]] = row
        seen[alike] += 1
    return tokens


def _drop_uneven(tokens: dict[int, dict[object, int]]) -> None:
    """Take out calls of which some ranks have more than others: which of them are missing, order cannot tell."""
    counts: dict[object, list[int]] = defaultdict(list)
    for each in tokens.values():
        for alike, count in Counter(token[0] for token in each).items():  # type: ignore[index]
            counts[alike].append(count)
    ranks = len(tokens)
    uneven = {alike for alike, each in counts.items() if len(each) < ranks or min(each) < max(each)}
    for each in tokens.values():
        for token in [t for t in each if t[0] in uneven]:  # type: ignore[index]
            del each[token]


def _agreeing(calls: Sequence[CollectiveCalls], members: list[Member]) -> tuple[list[Member], str]:
    """Return the members that agree in kind and size with most, and a sentence about the others."""
    signatures = [calls[m.rank].what[m.call].signature for m in members]
    common, count = Counter(signatures).most_common(1)[0]
    if count == len(members):
        return members, ""
    odd = next(i for i, each in enumerate(signatures) if each != common)
    first = signatures.index(common)
    a, b = members[first], members[odd]
    what_a, what_b = calls[a.rank].what[a.call], calls[b.rank].what[b.call]
    number = int(calls[a.rank].sequence[a.call])
    place = f"number {number} of {what_a.group_name}" if number >= 0 else f"one call of {what_a.group_name}"
    sentence = f"{place} is {what_a.text} on rank {calls[a.rank].rank} and {what_b.text} on rank {calls[b.rank].rank}."
    return [m for m, each in zip(members, signatures, strict=True) if each == common], sentence


def _counted(sentences: list[str]) -> tuple[str, ...]:
    return tuple(sorted(set(sentences)))


def _same_channels(calls: Sequence[CollectiveCalls]) -> Sequence[CollectiveCalls]:
    """Return the calls by channels: the k-th that each rank uses, where their names differ."""
    used = [
        list(dict.fromkeys(what.channel for what in each.what if what.key[0] == "channel"))
        for each in calls
        if len(each)
    ]
    if len({frozenset(names) for names in used}) < 2 or len({len(names) for names in used}) > 1:
        return calls
    renamed, k = [], 0
    for each in calls:
        if not len(each):
            renamed.append(each)
            continue
        names = {name: f"communication stream {i + 1}" for i, name in enumerate(used[k])}
        k += 1
        what = tuple(replace(w, channel=names[w.channel]) if w.channel in names else w for w in each.what)
        renamed.append(replace(each, what=what))
    return renamed


def _common_steps(calls: Sequence[CollectiveCalls]) -> bool:
    """Return whether all ranks with collectives number their steps, and share some."""
    numbers = [set(each.steps) for each in calls if len(each)]
    return bool(numbers) and all(numbers) and bool(set.intersection(*numbers))


def _one_job(calls: Sequence[CollectiveCalls]) -> None:
    """Raise GraphError where the recordings contradict each other."""
    ranks = Counter(each.rank for each in calls)
    if twice := [rank for rank, count in ranks.items() if count > 1]:
        raise GraphError(f"rank {twice[0]} is given twice; give one recording per rank of one job.")
    sizes = {each.world_size: each.rank for each in reversed(calls) if each.world_size > 0}
    if len(sizes) > 1:
        (a, b), *_ = zip(sorted(sizes), sorted(sizes)[1:], strict=False)
        raise GraphError(
            f"rank {sizes[a]} is one of {a} ranks and rank {sizes[b]} one of {b}: these are recordings of different "
            "jobs; give the ranks of one job, or choose one with `rank=`."
        )
    if sizes and (high := max(ranks)) >= (size := next(iter(sizes))):
        raise GraphError(f"rank {high} does not exist in a job of {size} ranks; give the ranks of one job.")
    _same_groups(calls)


def _same_steps(calls: Sequence[CollectiveCalls]) -> None:
    """Raise GraphError where only order could match calls, and the ranks recorded different steps."""
    some = [each for each in calls if len(each)]
    if len(some) < 2 or not all(each.steps for each in some) or all(np.all(each.sequence >= 0) for each in some):
        return
    if not set.intersection(*(set(each.steps) for each in some)):
        told = "; ".join(f"rank {each.rank} recorded {listed(sorted(each.steps))}" for each in some[:4])
        raise GraphError(
            f"the ranks have no step in common ({told}), so their collectives cannot be matched; record the same steps "
            "on all ranks, or choose one with `rank=`."
        )


def _same_groups(calls: Sequence[CollectiveCalls]) -> None:
    said: dict[str, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
    for each in calls:
        for what in each.described:
            if what.group and what.members and not what.peers:
                said[what.group].append((each.rank, what.members))
    for group, claims in said.items():
        for rank, members in claims:
            other = next(((r, m) for r, m in claims if r in members and set(m) != set(members)), None)
            if other is not None:
                raise GraphError(
                    f"process group {group} has the ranks {listed(members)} on rank {rank} and {listed(other[1])} on "
                    f"rank {other[0]}: these are recordings of different jobs; give the ranks of one job, or choose "
                    "one with `rank=`."
                )


def _missing(calls: Sequence[CollectiveCalls]) -> Iterable[str]:
    """Yield sentences about what the set lacks."""
    ranks = {each.rank for each in calls}
    world = max((each.world_size for each in calls), default=0)
    if world > len(ranks):
        lacking = sorted(set(range(world)) - ranks)
        yield (
            f"{len(lacking)} of {world} ranks are not in this set ({listed(lacking)}): waiting for them counts as "
            "transfer, and the last to arrive may be one of them."
        )
    for each in calls:
        if not len(each) and any(len(other) for other in calls):
            yield f"rank {each.rank} recorded no collective: its clock cannot be compared with the others'."
    lists = {each.rank: set(each.steps) for each in calls if each.steps}
    if len(lists) > 1:
        common = set.intersection(*lists.values())
        if not common:
            yield "the ranks have no step in common, so their windows count as one step."
        elif any(steps != common for steps in lists.values()):
            yield f"only the steps {listed(sorted(common))} were recorded by all ranks."


def listed(numbers: Sequence[int]) -> str:
    """Return numbers for a sentence, runs as "3-7", at most eight pieces."""
    pieces: list[str] = []
    for number in numbers:
        if pieces and int(pieces[-1].split("-")[-1]) == number - 1:
            pieces[-1] = f"{pieces[-1].split('-')[0]}-{number}"
        else:
            pieces.append(str(number))
    return ", ".join(pieces[:8]) + (f", ... ({len(numbers)} in all)" if len(pieces) > 8 else "")
