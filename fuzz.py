import random,sys,json,time
sys.path.insert(0,"/work/shared/rules")
import reference
from tests.core.player import Player, us
def scenario(seed):
    r=random.Random(seed)
    nt=r.randint(1,4)
    tiers=[]
    for i in range(nt):
        t={"name":f"t{i}"}
        if r.random()<.8: t["reserve"]=r.choice([.05,.1,.2,.3])
        if r.random()<.3: t["lend"]=r.choice([0,.5])
        if r.random()<.3: t["limit"]=r.choice([.3,.5,.9])
        if i==0 and r.random()<.3: t["always_first"]=True; t["limit"]=r.choice([.5,.9])
        if i and r.random()<.5: t["preemptible"]=True
        if r.random()<.5: t["preempt_after_s"]=r.choice([0,1,3])
        tiers.append(t)
    s={"tiers":tiers,"max_preemptions":r.randint(0,3),"weight_percent":r.choice([100,200,300])}
    s["aging"]={"promote_after_s":r.choice([2,5]),"ceiling":f"t{r.randrange(nt)}"} if r.random()<.6 else None
    if r.random()<.4: s["order"]="gain"; s["fair"]=r.choice([1,.5])
    ne=r.choice([1,1,2,3,4])
    names="abcd"[:ne]
    def offer(n,inc):
        o={"id":f"{n}#{inc}","known":True,"tokens":r.choice([50,100,200]),"requests":r.choice([2,4,8])}
        if r.random()<.6: o["prefill"]=r.choice([10,20,60])
        if r.random()<.2: o["speed"]=r.choice([500,2000])
        return o
    inc={n:1 for n in names}
    offers={n:offer(n,1) for n in names}
    s["engines"]=[dict(o) for o in offers.values()]
    steps=[];at=0.0;ids=[];k=0
    tenants=["","x","y","z"]; w={t:r.choice([1,2,4]) for t in tenants}
    for _ in range(r.randint(20,80)):
        at+=r.choice([0,0,.1,.5,1,3,7]); at=round(at,3)
        x=r.random()
        if x<.5 or not ids:
            i=f"r{k}";k+=1;ids.append(i);t=r.choice(tenants)
            st={"do":"submit","id":i,"tier":f"t{r.randrange(nt)}","tenant":t,"weight":w[t],"tokens":r.choice([1,5,10,20,40,60]),"prompt":r.choice([0,1,5,10,30])}
            if r.random()<.1: st["requests"]=2
            if r.random()<.4: st["hits"]={f"{n}#{inc[n]}":r.choice([1,4,8]) for n in names if r.random()<.5}
            if r.random()<.05: st["barred"]=[r.choice(names)]
            if s.get("order")=="gain" and r.random()<.8: st["gain"]={"weight":r.choice([1,2,4]),"tokens":r.choice([10,100]),"cost":r.choice([.1,.5,2]),"start_by":r.choice([0,1,5]),"slack":r.choice([.01,.1,.5])}
        elif x<.9:
            st={"do":r.choice(["settle"]*5+["prefilled"]*3+["cancel","resize","keep","requeue","hand_back"]),"id":r.choice(ids)}
            if st["do"]=="resize": st["tokens"]=r.choice([1,15,50])
            if st["do"]=="hand_back": st["barred"]=[r.choice(names)]
        elif x<.92: st={"do":"wait"}
        elif x<.94:
            t=r.choice(tenants); st={"do":"charge","tier":f"t{r.randrange(nt)}","tenant":t,"weight":w[t],"tokens":r.choice([5,50])}
        elif x<.97:
            n=r.choice(names); y=r.random()
            if y<.4: inc[n]+=1; offers[n]=offer(n,inc[n]); 
            elif y<.7: offers[n]["takes_new"]=r.random()<.6
            else: offers[n]["known"]=r.random()<.7
            if r.random()<.3: offers[n]["ramp_s"]=10; offers[n]["since_s"]=at
            st={"do":"engines","engines":[{k:v for k,v in o.items() if k!="known"} for o in offers.values() if o["known"]]}
        else:
            n=r.choice(names); st={"do":"cap","engine":f"{n}#{inc[n]}","requests":r.randint(0,3),"until":at+r.choice([1,5])}
        st["at"]=at; steps.append(st)
    s["steps"]=steps
    return s
def main(a,b):
    bad=0; adm=0;ch=0;t0=t1=0
    for seed in range(a,b):
        s=scenario(seed)
        ref=reference.new(s); ref.divide=lambda x,y:x/y
        p=Player(s)
        for n,st in enumerate(s["steps"]):
            now=us(st["at"])
            c=time.perf_counter(); ref.do(st,now); e=(ref.dispatch(now),ref.preempt(now)); t0+=time.perf_counter()-c
            c=time.perf_counter()
            try: p.do(st,now); g=(p.decide(now),p.preempt(now))
            except Exception:
                import traceback; traceback.print_exc(); g=None
            t1+=time.perf_counter()-c
            adm+=len(e[0]); ch+=len(e[1])
            if e!=g:
                bad+=1; print(seed,n,st,"expected",e,"got",g); break
    print(bad,"bad;",adm,"admitted",ch,"chosen; ref s",t0,"mine",t1)
if __name__=="__main__": main(int(sys.argv[1]),int(sys.argv[2]))
