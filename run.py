"""Many seeds. `run.py PROFILE,... FROM TO`, `run.py every 0 100`, `run.py controls [RULE,...]`, `run.py trace PROFILE SEED`."""
import collections
import re
import sys
import time
import traceback

from tests.core.world import PROFILES, Violation, World, play

CONTROLS = {   # rule -> what happens without it, and the profiles that must show that
    'outbox': ('a granted room counts only once its owner has stated it', 'calm network'),
    'repeat': ('a reply does not repeat unseen grants: a wake-up is all', 'calm network'),
    'number': ('a late or repeated call is applied', 'network all'),
    'silence': ('a silent store begins no epoch', 'clock pause all'),
    'clock': ('time runs backwards', 'scene'),
    'hold': ('an empty store grants at once', 'flush_only empty_quick'),
    'newcomer': ('a newcomer alone ends the hold of an empty store', 'flush_join all'),
    'dead': ('nobody is dropped', 'kill'),
    'layout': ('another layout comes into force at once', 'roll'),
    'fresh': ('a bid has the id of its request', 'network engines all'),
    'count': ('a heartbeat does not compare the number of bids', 'lost_bids rules'),
    'skip': ('a bid that no engine can take stands in the way', 'engines all'),
    'withdraw': ('a client that leaves does not withdraw its bid', 'calm network'),
    'alone': ('a replica decides alone at once', 'empty_quick empty_restart'),
}


def one(seed, profile, off=frozenset(), skip=frozenset()):
    try:
        world = play(seed, profile, off, skip=skip)
        return None, world
    except Violation as violation:
        return str(violation), None
    except Exception:
        return 'CRASH ' + traceback.format_exc()[-600:], None


def kind_of(text):
    return re.sub(r'[\d.]+', '#', text or '')[:40]


def shrink(seed, profile, off=frozenset()):
    """Leaves out faults as long as a violation of the same kind remains."""
    first, skip = one(seed, profile, off)[0], set()
    plan = World(seed, profile, off).plan
    for i in reversed(range(len(plan))):
        found = one(seed, profile, off, skip | {i})[0]
        if found and kind_of(found) == kind_of(first):
            skip, first = skip | {i}, found
    return first, [(at / 1e6, what) for i, (at, what) in enumerate(plan) if i not in skip], skip


def report(profile, seeds):
    began, bad, over = time.time(), collections.OrderedDict(), {}
    stats, counts = collections.Counter(), collections.Counter()
    for seed in seeds:
        violation, world = one(seed, profile)
        if violation:
            bad.setdefault(kind_of(violation), []).append(violation)
            continue
        stats.update(world.stats)

        for cause, (part, longest) in world.over.items():
            record = over.setdefault(cause, [0.0, 0, 0])
            record[:] = max(record[0], part), max(record[1], longest), record[2] + 1
    violations = sum(map(len, bad.values()))
    print(f'{profile:14} seeds {len(seeds)} violations {violations} {dict(stats)} {dict(counts)} {time.time() - began:.0f} s')
    for cause, (part, longest, runs) in sorted(over.items()):
        print(f'    over: {cause:34} at most {part:.2f} of an engine, {longest / 1e6:.2f} s, in {runs} runs')
    for texts in bad.values():
        print(f'    {len(texts)} x {texts[0][:700]}')
    sys.stdout.flush()
    return violations


def control(rule, most=60):
    what, profiles = CONTROLS[rule]
    if profiles == 'scene':
        with_it, without = scenes.SCENES[rule](frozenset()), scenes.SCENES[rule](frozenset([rule]))
        return f'{rule:9} {what:64} ' + (f'scene: {with_it}; without: {without}' if with_it != without else 'NOT CAUGHT')
    for profile in profiles.split():
        for seed in range(most):
            violation = one(seed, profile, frozenset([rule]))[0]
            if violation:
                return f'{rule:9} {what:64} {profile} {violation[:110]!r}'
    return f'{rule:9} {what:64} NOT CAUGHT'


if __name__ == '__main__':
    if sys.argv[1] == 'controls':
        lines = []
        for rule in (sys.argv[2].split(',') if len(sys.argv) > 2 else CONTROLS):
            lines.append(control(rule))
            print(lines[-1], flush=True)
        sys.exit(any('NOT CAUGHT' in line for line in lines))
    if sys.argv[1] == 'trace':
        off = frozenset(sys.argv[4].split(',')) if len(sys.argv) > 4 else frozenset()
        violation, plan, skip = shrink(int(sys.argv[3]), sys.argv[2], off)
        print(violation, plan)
        try:
            World(int(sys.argv[3]), sys.argv[2], off, frozenset(skip), trace=True).run()
        except Violation as found:
            print('VIOLATION', found)
        sys.exit()
    names = [name for word in sys.argv[1].split(',') for name in (PROFILES if word == 'every' else [word])]
    sys.exit(bool(sum([report(name, range(int(sys.argv[2]), int(sys.argv[3]))) for name in names])))
