import sys; sys.path.insert(0,"/work/shared/rules")
import reference, json
from fuzz import scenario
from tests.core.one import One, us
seed=int(sys.argv[1])
s=scenario(seed); s["steps"]=[st for st in s["steps"] if st["do"]!="charge" and not (st["do"]=="resize")]
print(json.dumps({k:v for k,v in s.items() if k!="steps"}))
ref=reference.new(s); ref.divide=lambda x,y:x/y
p=One(s,100000)
last=0
s["steps"]=[{**st,"at":st["at"]/20} for st in s["steps"]]
for n,st in enumerate(s["steps"]):
    now=us(st["at"])+10_000_000
    while last+1_000_000<now:
        last+=1_000_000
        ref.dispatch(last),ref.preempt(last); p.pump(last)
    last=now
    st={**st,"at":st["at"]+10}
    if "until" in st: st["until"]=st["until"]/20+10
    if st["do"]=="engines": st["engines"]=[{**o,"since_s":o.get("since_s",0)/20+10} for o in st["engines"]]
    if st["do"]=="settle" and (r:=ref.find(st["id"],"line")): continue
    ref.do(st,now); e=(ref.dispatch(now),ref.preempt(now))
    p.do(st,now); g=p.pump(now)
    print(n,st,e,g)
    if e!=g: break
sc=p.ledger.state.scheduler
print([(t.id,t.engine,t.is_for_floor,t.start) for t in sc.line],[[ (t.id,t.start) for t in q.queue] for q in sc.tiers],[(e.id,e.held,e.sent,e.is_ready) for e in sc.engines.values()],[(t.used,t.owes_until_us,t.queue.virtual) for t in sc.tiers])
print([(r.id,r.engine,r.for_floor,r.start) for r in ref.line],[(r.id,r.tier,r.start) for r in ref.all if r.state=="waiting"], ref.engines, ref.virtual, ref.owes)
