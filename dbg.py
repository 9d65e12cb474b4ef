from tests.core.world import World
w=World(2,"calm")
try: w.run()
except Exception as e: print(e)
s=w.store.state; print(s.scheduler.engines, s.hold_until, s.expected, [ (m.stated==s.epoch,m.is_new,m.view) for m in s.members.values()], s.epoch)
print([t.start for t in s.scheduler.tiers[0].queue][:5], s.scheduler._figures)
for n,r in w.replicas.items():
    m=r.member
    print(n,m.mode,m._due_us,w.now,m._in_flight,[ (len(t.queue),len(t.shown),t.queue.next()) for t in m._tiers],m._bids, m._withdrawn, m._heartbeat_us)
    t=m._tiers[0]
    nx=t.queue.next(); print(nx and m._can_use(nx))
