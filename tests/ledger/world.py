"""The world around the ledger: a network that loses, delays, repeats and reorders; a store and replicas that fail in
every way; engines that count what really runs on them; clients that leave. One seed is one run, always the same.

What is checked, at every call that the store executes and at every start of a request:
  I1  the store counts for every replica at least what it runs, but in windows that are named (`uncovered_why`)
  I2  the store never grants more of an engine than it has, by its own figures
  I3  a request runs at most once at a time, and ends exactly once
  I4  engines never run more than they have; in profiles outside STRICT at most by what a named window let in
  I5  when nothing happens for 4.5 s: the store's figures are the truth, and no bid that fits waits
  I7  while faults go on: no bid that would be admitted waits for 3 s, and none is kept whose request is gone
  I8  at the end nothing is left: no sum, bid, grant, tag
"""

from __future__ import annotations

import copy
import heapq
import random

from sidecar.pools.calls import DEAD_US as DEAD
from sidecar.pools.calls import HEARTBEAT_US as BEAT
from sidecar.pools.ledger import Ledger
from tests.ledger.replica import ModelReplica as Replica
from tests.ledger.replica import Request, pool_rules

SECOND = 1_000_000


def add(total, amount, sign=1):
    for i in range(3):
        total[i] += sign * amount[i]


PROFILES = {  # the faults that a run may have
    "calm": (),
    "network": ("lose", "late", "repeat", "wake"),
    "kill": ("lose", "wake", "kill", "restart"),
    "engines": ("wake", "engine", "unreach", "drain"),
    "pause": ("wake", "pause_store", "late"),
    "clock": ("wake", "clock", "lose"),
    "flush": ("wake", "flush", "lose"),
    "flush_only": ("wake", "flush"),
    "flush_join": ("wake", "flush", "restart"),
    "flush_stop": ("wake", "flush", "sigstop"),
    "empty_restart": ("wake", "restart_store"),
    "empty_quick": ("wake", "restart_quick"),
    "old_restart": ("wake", "restart_old"),
    "failover": ("wake", "failover"),
    "failover_late": ("wake", "failover", "late", "lose"),
    "lost_bids": ("wake", "lost_bids"),
    "sigstop": ("wake", "sigstop", "lose"),
    "stop": ("wake", "sigstop", "pause_store"),
    "cut": ("wake", "cut"),
    "growth": ("wake", "lose", "growth"),
    "roll": ("wake", "roll", "lose", "kill"),
    "rules": ("wake", "rules", "lose", "kill", "restart"),
}
PROFILES["all"] = tuple(dict.fromkeys(fault for name, faults in PROFILES.items() for fault in faults))
STRICT = {"calm", "network", "kill", "engines", "clock", "flush_only", "flush_join", "empty_quick", "roll", "rules"}
"""Profiles in which nothing may ever exceed an engine."""
IN_THE_NETWORK = (
    "lose",
    "late",
    "repeat",
    "wake",
    "growth",
    "roll",
)  # these happen all the time, or by a plan of their own


class Violation(Exception):
    pass


class Engine:
    """What really runs: `runs` by (replica, request). `base`: the same without growth that its replica decided."""

    def __init__(self, name, capacity, prefill):
        self.name, self.capacity, self.prefill, self.up = name, capacity, prefill, True
        self.runs, self.base, self.over_since = {}, {}, None


class World:
    FAULTS_FROM, FAULTS_TO, FREEZE, STOP, END = 3 * SECOND, 24 * SECOND, 38 * SECOND, 43 * SECOND, 900 * SECOND

    def __init__(self, seed, profile="all", skip=frozenset(), **fixed):
        self.random = draw = random.Random(f"{seed} {profile}")
        self.seed, self.profile, self.skip = seed, profile, skip
        self.story = []
        self.faults = PROFILES.get(profile, ())
        self.now, self.heap, self.count, self.is_over, self.is_frozen = 0, [], 0, False, False
        self.store = Ledger()
        self.store_paused, self.store_down, self.inbox, self.clock, self.store_life, self.saved = (
            False,
            False,
            [],
            0,
            0,
            None,
        )
        self.replicas, self.names, self.requests, self.plan = {}, 0, {}, []
        self.loss = self.wake_loss = self.late = self.repeat = 0.0
        self.cut, self.links_down, self.beside, self.ghosts = set(), set(), None, set()
        self.over = {}  # cause -> [largest part of an engine over, longest]
        self.stats = {"admitted": 0, "events": 0, "alone": 0, "calls": 0, "wakes": 0}
        self.most_bids = fixed.get("most_bids", draw.choice((1, 2, 4, 8)))
        self.tiers = draw.choice(
            ([("high", 0.3), ("low", 0.2)], [("critical", 0.2), ("high", 0.3), ("batch", 0.1)], [("only", 0.5)])
        )
        self.rules, self.layout = (tuple(self.tiers),), 1
        sizes = fixed.get("engines", [draw.choice((6, 10, 14)) for _ in range(draw.choice((1, 1, 2, 3)))])
        prefill = fixed.get("prefill", draw.choice((100, 12)))
        self.engines = {f"e{i}#1": Engine(f"e{i}#1", size, prefill) for i, size in enumerate(sizes)}
        self.rate = fixed.get("rate", draw.uniform(0.6, 1.6))
        self.long = fixed.get("long", draw.choice((0, 0.05, 0.2)))
        self.leaving = fixed.get("leaving", 0.25)
        for _ in range(fixed.get("replicas", draw.choice((1, 2, 3, 3, 4)))):
            self.add_replica()
        if not fixed.get("no_plan"):
            self.plan_faults()
        self.mean_gap = 2.0 * 2.5 / (sum(sizes) * self.rate)  # 2.5 tokens, held for 2 s, on average
        self.at(0, self.next_arrival)
        self.at(3 * SECOND, self.probe)
        self.at(500_000, self.save)
        self.at(self.FREEZE, self.freeze)
        self.at(self.FREEZE + 4_500_000, self.check_frozen)
        self.at(self.STOP, self.thaw)
        self.at(self.STOP + SECOND, self.poll_end)

    # ---- events ---------------------------------------------------------------------------------------------------

    def at(self, delay, function, *args):
        self.count += 1
        heapq.heappush(self.heap, (self.now + delay, self.count, function, args))

    def for_replica(self, replica, function, args):
        if replica.dead:
            return
        if replica.paused:
            replica.backlog.append((function, args))
        else:
            function(*args)

    def run(self):
        while self.heap and not self.is_over:
            self.now, _, function, args = heapq.heappop(self.heap)
            self.stats["events"] += 1
            function(*args)
        return self

    def say(self, *what):
        self.story.append((self.now, *what))

    def fail(self, what):
        raise Violation(f"{what} (seed {self.seed} {self.profile} at {self.now / 1e6:.6f})")

    # ---- replicas -------------------------------------------------------------------------------------------------

    def add_replica(self, layout=None, rules=None, takes_over=False):
        self.names += 1
        name = f"r{self.names}"
        divides = not (self.profile in STRICT and "lose" in self.faults)
        replica = Replica(
            self,
            name,
            layout or self.layout,
            rules or self.rules,
            most_bids=self.most_bids,
            divides=divides,
            takes_over=takes_over,
        )
        replica.view = {e.name: [e.capacity, e.prefill, e.up] for e in self.engines.values()}
        self.replicas[name] = replica
        replica.start()
        return replica

    def kill(self, replica):
        self.say("KILL", replica.name)
        replica.dead = True
        self.replicas.pop(replica.name, None)
        for request in self.requests.values():
            if request.replica is replica and request.outcome is None:
                request.status, request.outcome = "done", "killed"
                self.ended(request)
        for engine in self.engines.values():
            for key in [key for key in engine.runs if key[0] == replica.name]:
                del engine.runs[key], engine.base[key]
        self.update_over()

    def gone(self, replica):
        self.say("BYE", replica.name)
        self.replicas.pop(replica.name, None)

    # ---- the network ----------------------------------------------------------------------------------------------

    def delay(self):
        draw = self.random
        return draw.randrange(200, 1500) if draw.random() < 0.95 else draw.randrange(1500, 60_000)

    def send_call(self, replica, call):
        connection, draw = replica.connection, self.random
        if replica.name in self.cut or draw.random() < self.loss:
            return
        if self.store_down:
            self.at(self.delay(), self.for_replica, replica, replica.broken, (connection,))
            return
        delay = self.delay() + (draw.randrange(300_000, 4_000_000) if draw.random() < self.late else 0)
        self.at(delay, self.at_store, replica, call, connection, self.store_life)
        if draw.random() < self.repeat:
            self.at(delay + draw.randrange(100, 3_000_000), self.at_store, replica, call, connection, self.store_life)

    def at_store(self, replica, call, connection, life):
        if life != self.store_life or self.store_down:
            return
        if self.store_paused:
            self.inbox.append((replica, call, connection, life))
            return
        self.stats["calls"] += 1
        reply, wakes = self.execute(call)
        self.say(
            "  store",
            call.who,
            call.kind,
            call.number,
            "acks",
            call.acks,
            "cells",
            call.cells,
            "bids",
            [(b.id, b.tokens) for b in call.bids],
            "withdrawn",
            call.withdrawn,
            "->",
            reply.kind,
            [(g.bid, g.engine) for g in reply.grants],
        )
        if call.kind == "state" and reply.kind == "ok" and call.number == replica.number:
            replica.covered = True
        self.check_truth()
        if replica.name not in self.cut and self.random.random() >= self.loss:
            self.at(self.delay(), self.for_replica, replica, replica.answered, (copy.deepcopy(reply), connection))
        for wake in wakes:
            self.stats["wakes"] += 1
            self.publish(wake)

    def publish(self, wake):
        draw = self.random
        for replica in list(self.replicas.values()) if not wake.to else [self.replicas.get(wake.to)]:
            if replica is None or replica.name in self.cut or draw.random() < self.wake_loss:
                continue
            for _ in range(2 if draw.random() < self.repeat else 1):
                delay = self.delay() + (draw.randrange(3_000_000) if draw.random() < self.late else 0)
                self.at(delay, self.for_replica, replica, replica.woken, (copy.deepcopy(wake),))

    # ---- clients --------------------------------------------------------------------------------------------------

    def next_arrival(self):
        if self.now < self.FREEZE:
            self.at(int(self.random.expovariate(1 / self.mean_gap) * 1e6) + 1, self.next_arrival)
            if self.replicas:
                self.arrive(self.random.choice(list(self.replicas.values())))

    def arrive(self, replica):
        draw = self.random
        tokens, prompt = draw.choice((1, 2, 2, 3, 4)), draw.randrange(1, 4)
        hits = {name: draw.randrange(0, prompt) for name in self.engines if draw.random() < 0.3}
        request = Request(
            len(self.requests) + 1,
            draw.choice(self.tiers)[0],
            f"t{draw.randrange(3)}",
            tokens=tokens,
            prompt=prompt,
            hits=hits,
            arrived=self.now,
            weight=draw.choice((1, 1, 2)),
        )
        self.requests[request.id] = request
        request.service = min(8_000_000, int(draw.expovariate(1 / 2.0) * 1e6) + 1000)
        if draw.random() < self.long:
            request.service = draw.randrange(8_000_000, 30_000_000)
        request.replica, request.cause, request.ends = replica, None, 0
        self.at(0, self.for_replica, replica, replica.arrive, (request,))
        if draw.random() < self.leaving:
            self.at(int(draw.expovariate(1 / 2.0) * 1e6), self.leave, request)

    def leave(self, request):
        if self.is_frozen:
            self.at(self.STOP - self.now + self.random.randrange(1000), self.leave, request)
        elif request.outcome is None:
            self.for_replica(request.replica, request.replica.client_left, (request,))

    def ended(self, request):
        request.ends += 1
        if request.ends > 1 or not request.outcome:
            self.fail(f"I3: request {request.id} ended {request.ends} times: {request.outcome}")

    # ---- engines --------------------------------------------------------------------------------------------------

    def engine_start(self, replica, request, name):
        engine, draw = self.engines[name], self.random
        request.runs += 1
        key = (replica.name, request.id)
        if request.outcome or any(key in other.runs for other in self.engines.values()):
            self.fail(f"I3: request {request.id} runs twice, or after its end")
        self.say("    run", replica.name, request.id, name, request.tokens)
        self.stats["admitted"] += 1
        if not engine.up or (replica.name, name) in self.links_down:
            self.at(self.delay(), self.for_replica, replica, replica.refused_by_engine, (request, request.runs, name))
            return
        engine.runs[key], engine.base[key] = [request.tokens, 1, request.sent], [request.tokens, 1, request.sent]
        request.cause = self.excess(replica, engine)
        self.check_over(engine)
        run, left = request.runs, request.service
        self.at(min(left - 1, draw.randrange(1000, 200_000)), self.first_byte, replica, request, run, engine)
        self.at(left, self.finish, replica, request, run, engine)
        if "growth" in self.faults and draw.random() < 0.3:
            self.at(left // 2, self.grow, replica, request, run, engine, draw.choice((-1, 1, 2)))

    def is_there(self, replica, request, run, engine):
        return request.runs == run and (replica.name, request.id) in engine.runs

    def first_byte(self, replica, request, run, engine):
        if self.is_there(replica, request, run, engine):
            key = (replica.name, request.id)
            engine.runs[key][2] = engine.base[key][2] = 0
            self.for_replica(replica, replica.first_byte, (request, run))

    def grow(self, replica, request, run, engine, by):
        if self.is_there(replica, request, run, engine) and not self.is_frozen and not replica.paused:
            runs, base = engine.runs[replica.name, request.id], engine.base[replica.name, request.id]
            runs[0] = max(1, runs[0] + by)
            base[0] = min(base[0], runs[0])
            self.for_replica(replica, replica.resize, (request, run, runs[0]))

    def finish(self, replica, request, run, engine):
        if self.is_frozen:
            self.at(self.STOP - self.now + self.random.randrange(2_000_000), self.finish, replica, request, run, engine)
        elif self.is_there(replica, request, run, engine):
            del engine.runs[replica.name, request.id], engine.base[replica.name, request.id]
            self.update_over()
            self.for_replica(replica, replica.ended_at_engine, (request, run, "served"))

    def engine_stop(self, replica, request):
        engine = self.engines[request.engine]
        engine.runs.pop((replica.name, request.id), None)
        engine.base.pop((replica.name, request.id), None)
        self.update_over()

    def engine_down(self, engine, microseconds):
        self.say("ENGINE DOWN", engine.name)
        engine.up = False
        lost, engine.runs, engine.base = list(engine.runs), {}, {}
        for name, number in lost:
            replica, request = self.replicas.get(name), self.requests[number]
            if replica and self.random.random() < 0.5:  # before the first byte it is tried again
                self.at(
                    self.delay(),
                    self.for_replica,
                    replica,
                    replica.refused_by_engine,
                    (request, request.runs, engine.name),
                )
            elif replica:
                self.at(
                    self.delay(), self.for_replica, replica, replica.ended_at_engine, (request, request.runs, "broken")
                )
        self.look(engine)
        self.at(microseconds, self.engine_up, engine)

    def engine_up(self, engine):
        self.say("ENGINE UP", engine.name)
        engine.up = True
        self.look(engine)

    def look(self, engine):
        for replica in list(self.replicas.values()):
            self.at(self.random.randrange(1000, 400_000), self.for_replica, replica, self.see, (replica, engine))

    def see(self, replica, engine):
        reachable = engine.up and (replica.name, engine.name) not in self.links_down
        replica.engine_seen(engine.name, engine.capacity, engine.prefill, reachable)

    # ---- faults ---------------------------------------------------------------------------------------------------

    def plan_faults(self):
        draw = self.random
        for kind, name, most in (
            ("lose", "loss", 0.06),
            ("late", "late", 0.05),
            ("repeat", "repeat", 0.05),
            ("wake", "wake_loss", 0.3),
        ):
            if kind in self.faults:
                setattr(self, name, draw.choice((0, most / 3, most)))
        self.at(self.FAULTS_TO, self.heal)
        kinds, at = [kind for kind in self.faults if kind not in IN_THE_NETWORK], self.FAULTS_FROM
        while kinds:
            at += int(draw.expovariate(1 / draw.choice((1.0, 3.0))) * 1e6)
            if at > self.FAULTS_TO - 500_000:
                break
            self.plan.append((at, draw.choice(kinds)))
        for i, (at, kind) in enumerate(self.plan):
            if i not in self.skip:
                self.at(at, self.fault, kind)
        if "roll" in self.faults:
            self.at(draw.randrange(4 * SECOND, 6 * SECOND), self.roll, 2)
            if draw.random() < 0.5:
                self.at(draw.randrange(10 * SECOND, 14 * SECOND), self.roll, 1)

    def fault(self, kind):
        self.say("FAULT", kind)
        replicas = list(self.replicas.values())
        getattr(self, f"do_{kind}")(replicas)

    def do_kill(self, replicas):
        if len(replicas) > 1:
            self.kill(self.random.choice(replicas))
            if self.random.random() < 0.7:
                self.at(self.random.randrange(3_000_000), self.add_replica)

    def do_restart(self, replicas):
        if replicas:
            replica = self.random.choice(replicas)
            replica.closing = True
            if not replica.paused:
                replica.want(0)
            self.add_replica()

    def do_sigstop(self, replicas, seconds=None):
        running = [replica for replica in replicas if not replica.paused]
        if running:
            replica = self.random.choice(running)
            replica.paused = True
            self.at(int((seconds or self.random.choice((0.5, 3, 9, 12))) * SECOND), self.resume, replica)

    def do_cut(self, replicas, seconds=None):
        if replicas:
            replica = self.random.choice(replicas)
            self.cut.add(replica.name)
            self.at(int((seconds or self.random.choice((0.3, 2, 5, 13))) * SECOND), self.uncut, replica)

    def do_pause_store(self, replicas, seconds=None):
        if not self.store_paused:
            self.store_paused = True
            self.at(int((seconds or self.random.choice((0.2, 1.2, 2, 3, 6, 12.5))) * SECOND), self.resume_store)

    def do_flush(self, replicas):
        self.store.state = None

    def do_restart_store(self, replicas, seconds=None):
        self.stop_store(replicas, None, seconds or self.random.choice((0.1, 0.4, 1.5, 3, 12)))

    def do_restart_quick(self, replicas):
        self.stop_store(replicas, None, self.random.choice((0.1, 0.4, 1.5)))

    def do_restart_old(self, replicas):
        self.stop_store(replicas, copy.deepcopy(self.saved), self.random.choice((0.1, 0.4, 1.5, 3, 12)))

    def stop_store(self, replicas, state, seconds):
        if self.store_down:
            return
        self.store_down, self.inbox, self.store.state = True, [], state
        self.store_life += 1
        if state is not None:
            self.uncover()
        for replica in replicas:
            self.at(self.delay(), self.for_replica, replica, replica.broken, (replica.connection,))
        self.at(int(seconds * SECOND), self.store_up)

    def do_failover(self, replicas, seconds=None):
        """Another server goes on with what it had copied: the last writes are lost."""
        if self.store.state is not None:
            lost = self.random.choice((0, 0.1, 1)) if seconds is None else seconds
            self.at(int(lost * SECOND), self.fail_over, copy.deepcopy(self.store.state))

    def fail_over(self, state):
        if self.store_down:
            return
        self.say("FAILOVER")
        self.store.state, self.inbox = state, []
        self.store_life += 1
        self.uncover()
        if self.random.random() < 0.7:  # else something between hides it from the replicas
            for replica in list(self.replicas.values()):
                self.at(self.delay(), self.for_replica, replica, replica.broken, (replica.connection,))

    def do_lost_bids(self, replicas):
        if self.store.state and self.store.state.members:
            member = self.random.choice(list(self.store.state.members.values()))
            self.store._drop_bids(member)

    def do_clock(self, replicas, seconds=None):
        self.clock += (seconds or self.random.choice((-20, -3, -1, 1, 3, 11, 30))) * SECOND

    def do_engine(self, replicas):
        engine = self.random.choice(list(self.engines.values()))
        if engine.up:
            self.engine_down(engine, self.random.randrange(100_000, 3_000_000))

    def do_unreach(self, replicas):
        if replicas:
            pair = (self.random.choice(replicas).name, self.random.choice(list(self.engines)))
            self.links_down.add(pair)
            self.look(self.engines[pair[1]])
            self.at(self.random.randrange(500_000, 6_000_000), self.relink, pair)

    def do_drain(self, replicas):
        engine = self.random.choice(list(self.engines.values()))
        shared = [replica for replica in replicas if replica.mode == "shared" and not replica.paused]
        if len(self.engines) > 1 and shared and engine.up:
            shared[0].drain(engine.name, True)
            self.at(self.random.randrange(1_000_000, 5_000_000), self.undrain, engine)

    def do_rules(self, replicas):
        """A replica brings other shares of the same tiers. Or one has other tiers, and may take the pool over."""
        draw = self.random
        if not replicas:
            return
        if draw.random() < 0.6:
            self.rules = (tuple((name, draw.choice((0.1, 0.2, 0.3))) for name, _ in self.tiers),)
            replica = draw.choice(replicas)
            if getattr(replica, "is_other", False):
                return
            replica.member.change_rules(pool_rules(self.rules[0]), self.now)
            replica.pump()
        else:
            takes_over = draw.random() < 0.3
            self.add_replica(rules=((("new", 0.2), *self.rules[0]),), takes_over=takes_over).is_other = True
            if takes_over:
                self.at(draw.randrange(2_000_000, 4_000_000), self.add_replica, None, None, True)

    def undrain(self, engine):
        shared = [replica for replica in self.replicas.values() if replica.mode == "shared" and not replica.paused]
        if shared:
            shared[-1].drain(engine.name, False)
        else:
            self.at(500_000, self.undrain, engine)

    def relink(self, pair):
        self.links_down.discard(pair)
        self.look(self.engines[pair[1]])

    def resume(self, replica):
        if not replica.paused:
            return
        self.say("RESUME", replica.name)
        replica.paused = False
        backlog, replica.backlog = replica.backlog, []
        if self.random.random() < 0.7:  # what the sockets have first, or the timers
            names = ("send_timer", "timeout", "heartbeat", "admit_alone")
            timers = [item for item in backlog if item[0].__name__ in names]
            sockets = [item for item in backlog if item[0].__name__ not in names]
            backlog = sockets + timers if self.random.random() < 0.5 else timers + sockets
        for function, args in backlog:
            self.for_replica(replica, function, args)

    def uncut(self, replica):
        self.cut.discard(replica.name)
        if replica.name in self.replicas:
            self.for_replica(replica, replica.broken, (replica.connection,))

    def resume_store(self):
        if self.store_paused:
            self.say("STORE RESUMES")
            self.store_paused = False
            inbox, self.inbox = self.inbox, []
            for item in inbox:
                self.at(self.random.randrange(100), self.at_store, *item)

    def store_up(self):
        self.store_down = False

    def save(self):
        """What a store that writes once a second to its disk has after a crash."""
        if self.store.state is not None and not self.store_down and "restart_old" in self.faults:
            self.saved = copy.deepcopy(self.store.state)
        if self.now < self.FAULTS_TO:
            self.at(SECOND, self.save)

    def uncover(self):
        """The store forgot its last second. It knows it again after one heartbeat of every replica: the bound of I1."""
        self.uncovered = self.now
        for replica in self.replicas.values():
            replica.covered, replica.uncovered_why = False, "the store lost its last writes"
        self.at(BEAT + 200_000, self.cover_again, self.now)

    def cover_again(self, since):
        for replica in self.replicas.values():
            if (
                since == self.uncovered
                and not self.store_down
                and not self.store_paused
                and replica.mode == "shared"
                and replica.uncovered_why == "the store lost its last writes"
                and self.loss == 0
                and not replica.paused
                and replica.name not in self.cut
            ):
                replica.covered = True

    def roll(self, layout):
        """A rolling upgrade to another layout, or its way back: one replica after the other, the new one first."""
        self.layout, at = layout, 0
        for replica in [replica for replica in self.replicas.values() if replica.layout != layout]:
            at += self.random.randrange(300_000, 1_000_000)
            self.at(at, self.replace, replica, layout)

    def replace(self, replica, layout):
        self.add_replica(layout)
        if replica.name in self.replicas:
            replica.closing = True
            if not replica.paused:
                replica.want(0)
            self.at(4_000_000, self.kill_unless_dead, replica)

    def kill_unless_dead(self, replica):
        if not replica.dead:
            self.kill(replica)

    def heal(self):
        self.say("HEAL")
        self.loss = self.wake_loss = self.late = self.repeat = 0.0
        for replica in list(self.replicas.values()):
            self.resume(replica)
        for name in list(self.cut):
            self.cut.discard(name)
            if name in self.replicas:
                replica = self.replicas[name]
                self.at(0, self.for_replica, replica, replica.broken, (replica.connection,))
        self.resume_store()
        self.store_down, self.links_down = False, set()
        for engine in self.engines.values():
            self.look(engine)
        for replica in [replica for replica in self.replicas.values() if getattr(replica, "is_other", False)]:
            self.kill(replica)
        if all(replica.closing or replica.is_foreign for replica in self.replicas.values()):
            self.add_replica(takes_over=True)

    # ---- checks ---------------------------------------------------------------------------------------------------

    def execute(self, call):
        """One call, and the check I2 of what it granted."""
        before = self.outbox(self.store.state)
        reply, wakes = self.store.execute(copy.deepcopy(call), self.now + self.clock)
        state = self.store.state
        granted = {engine for _, engine in self.outbox(state) - before}
        for name in granted:
            engine = state.scheduler.engines[name]
            for replica in self.replicas.values():
                why = self.excess(replica, self.engines[name])
                if why:
                    self.mark(replica, self.engines[name], why)
            if engine.held[0] > engine.tokens or engine.held[1] > engine.requests:
                self.fail(f"I2: the store gave {name} more than it has: {engine.held}")
        return reply, wakes

    @staticmethod
    def outbox(state):
        members = state.members if state else {}
        return {((who, bid), grant.engine) for who, member in members.items() for bid, grant in member.outbox.items()}

    @staticmethod
    def row(member):
        total = {}
        for held in [*member.row.values(), *member.outbox.values()]:
            add(total.setdefault((held.tier, held.engine), [0, 0, 0]), [held.tokens, held.requests, held.sent])
        return total

    def excess(self, replica, engine):
        """Whether the store counts less for a replica than it runs; then why that may be."""
        base = [0, 0, 0]
        for (name, _), amount in engine.base.items():
            if name == replica.name:
                add(base, amount)
        state = self.store.state
        member = state.members.get(replica.name) if state else None
        if member is None:
            return self.why_unknown(replica) if any(base) else None
        row = [0, 0, 0]
        for (_, name), amount in self.row(member).items():
            if name == engine.name:
                add(row, amount)
        if all(b <= r for b, r in zip(base, row, strict=True)):
            return None
        if replica.covered:
            self.fail(f"I1: {replica.name} runs {base} on {engine.name}, the store counts {row}")
        return replica.uncovered_why

    def why_unknown(self, replica):
        state = self.store.state
        if replica.mode == "alone":
            return self.why_alone(replica)
        if state is None or (state.is_empty and state.last_call < state.epoch + DEAD):
            return "empty store, not stated"
        return "dropped as dead"

    def why_alone(self, replica):
        if self.now >= replica.last_answer + DEAD:
            return "alone: its whole part, after 10 s"
        if self.store_down or self.store_paused:
            return "alone: by its last figures"
        return "alone: others have the store"

    def admitted_alone(self, replica, request, engine):
        """The store may count more than that for it: then nothing is uncovered. To be simple the world assumes not."""
        self.stats["alone"] += 1
        replica.covered, replica.uncovered_why = False, self.why_alone(replica)

    def mark(self, replica, engine, why):
        for name, number in engine.base:
            if name == replica.name and self.requests[number].cause is None:
                self.requests[number].cause = why

    def check_truth(self):
        for engine in self.engines.values():
            for replica in self.replicas.values():
                self.excess(replica, engine)
            self.check_over(engine)

    def check_over(self, engine):
        total = [0, 0, 0]
        for amount in engine.base.values():
            add(total, amount)
        over = max(total[0], total[1]) - engine.capacity
        if over > 0:
            causes = {}
            for (_, number), amount in engine.base.items():
                if self.requests[number].cause:
                    causes[self.requests[number].cause] = causes.get(self.requests[number].cause, 0) + amount[0]
            if self.profile in STRICT or over > sum(causes.values()):
                self.fail(f"I4: {engine.name} runs {total} of {engine.capacity}; explained {causes}")
            cause = max(causes, key=causes.get)
            record = self.over.setdefault(cause, [0.0, 0])
            record[0] = max(record[0], over / engine.capacity)
            engine.over_since = engine.over_since or (self.now, cause)
        elif engine.over_since:
            since, cause = engine.over_since
            self.over[cause][1] = max(self.over[cause][1], self.now - since)
            engine.over_since = None

    def update_over(self):
        for engine in self.engines.values():
            if engine.over_since:
                self.check_over(engine)

    def granted_by_a_clone(self):
        """Whom the store would grant something if it were called now."""
        clone = Ledger()
        clone.state = state = copy.deepcopy(self.store.state)
        found = state.scheduler.decide(state.last_call + 1) if not state.hold_until else []
        return [grant.ticket.owner for grant in found]

    def probe(self):
        """While faults go on: a bid that the rules would let in, if no bid stood in the way that no engine can take."""
        if self.now > self.FREEZE - 2 * SECOND:
            return
        self.at(500_000, self.probe)
        state, found = self.store.state, None
        if (
            state
            and not self.store_paused
            and not self.store_down
            and not state.hold_until
            and state.names
            and self.loss == 0
        ):
            found = self.granted_by_a_clone()
        if self.profile == "calm":
            ghosts = {
                (name, bid)
                for name, member in state.members.items()
                for bid in member.bids
                if name in self.replicas and bid not in self.replicas[name].open
            }
            if ghosts & self.ghosts:
                self.fail(f"I7: the store keeps bids of requests that are gone: {ghosts & self.ghosts}")
            self.ghosts = ghosts
        self.beside = (self.beside or self.now) if found else None
        if found and self.now - self.beside > 3 * SECOND:
            self.fail(f"I7: {found} wait beside room since {self.beside / 1e6:.1f}")

    def freeze(self):
        self.say("FREEZE")
        self.is_frozen = True

    def thaw(self):
        self.say("THAW")
        self.is_frozen = False

    def check_frozen(self):
        state = self.store.state
        if set(state.members) != set(self.replicas) or state.hold_until:
            self.fail(
                f"I5: members {sorted(state.members)}, alive {sorted(self.replicas)}, on hold until {state.hold_until}"
            )
        for name, replica in self.replicas.items():
            member = state.members[name]
            if replica.is_foreign:
                continue
            if replica.mode != "shared":
                self.fail(f"I5: {name} is {replica.mode}")
            row, truth = {cell: amount for cell, amount in self.row(member).items() if any(amount)}, {}
            for engine in self.engines.values():
                for (owner, number), amount in engine.runs.items():
                    if owner == name:
                        add(truth.setdefault((self.requests[number].tier, engine.name), [0, 0, 0]), amount)
            if row != truth or member.outbox:
                self.fail(f"I5: {name}: row {row}, truth {truth}, unseen grants {member.outbox}")
            if set(member.bids) != set(replica.open):
                self.fail(f"I5: {name}: bids {sorted(member.bids)} in the store, {sorted(replica.open)} here")
            for tier in {request.tier for request in replica.waiting().values()}:
                waiting = sum(
                    request.tier == tier and replica.can_use(request) for request in replica.waiting().values()
                )
                shown = sum(request.tier == tier for request in replica.open.values())
                if shown < min(waiting, replica.most_bids):
                    self.fail(f"I5: {name}: {shown} bids of {waiting} that wait in {tier}")
        if self.granted_by_a_clone():
            self.fail(f"I5: {self.granted_by_a_clone()} wait beside room")

    def poll_end(self):
        if all(request.ends for request in self.requests.values()) or self.now > self.END:
            self.at(5_000_000, self.check_end)
        else:
            self.at(1_000_000, self.poll_end)

    def check_end(self):
        self.is_over = True
        left = [request.id for request in self.requests.values() if request.ends != 1]
        if left:
            self.fail(
                f"I8: {len(left)} requests never ended: {left[:5]} "
                f"{[self.requests[number].status for number in left[:5]]}"
            )
        for member in self.store.state.members.values():
            if any(any(amount) for amount in self.row(member).values()) or member.bids or member.outbox:
                self.fail(f"I8: a member has {self.row(member)} {member.bids} {member.outbox} at the end")
        if self.store.state.scheduler.line or any(len(tier.queue) for tier in self.store.state.scheduler.tiers):
            self.fail(f"I8: line {self.store.state.scheduler.line}, or tags, are left")
        if any(engine.runs for engine in self.engines.values()):
            self.fail("I8: an engine runs something")


def play(seed, profile="all", skip=frozenset()):
    return World(seed, profile, skip).run()
