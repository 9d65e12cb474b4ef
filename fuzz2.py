import sys; sys.path.insert(0,"/work/shared/rules")
import reference
from fuzz import scenario
from tests.core.one import One, us
bad=adm=ch=0
a,b,w=int(sys.argv[1]),int(sys.argv[2]),int(sys.argv[3])
for seed in range(a,b):
    s=scenario(seed)
    s["steps"]=[st for st in s["steps"] if st["do"]!="charge" and not (st["do"]=="resize")]
    ref=reference.new(s); ref.divide=lambda x,y:x/y
    try:
        p=One(s,w)
        last=0
        s["steps"]=[{**st,"at":st["at"]/20} for st in s["steps"]]
        out=False
        for n,st in enumerate(s["steps"]):
            now=us(st["at"])+10_000_000
            while last+1_000_000<now:
                last+=1_000_000
                e=(ref.dispatch(last),ref.preempt(last)); g=p.pump(last)
                if e[0]!=g[0] or sorted(e[1])!=sorted(g[1]): print(seed,n,"beat",last,e,g); out=True; break
            if out: bad+=1; break
            last=now
            st={**st,"at":st["at"]+10}
            if "until" in st: st["until"]=st["until"]/20+10
            if st["do"]=="engines": st["engines"]=[{**o,"since_s":o.get("since_s",0)/20+10} for o in st["engines"]]
            if st["do"]=="settle" and (r:=ref.find(st["id"],"line")): continue
            ref.do(st,now); e=(ref.dispatch(now),ref.preempt(now))
            p.do(st,now); g=p.pump(now)
            adm+=len(e[0]);ch+=len(e[1])
            if e[0]!=g[0] or sorted(e[1])!=sorted(g[1]):
                bad+=1; print(seed,n,st,"expected",e,"got",g); break
    except Exception:
        import traceback; traceback.print_exc(); bad+=1; print(seed)
print(bad,"bad",adm,ch)
