import json,sys
sys.path.insert(0,"/work/shared/rules")
from tests.core.player import answers
bad=tot=0
for f in ("lessons","random","fleet","gain","dense"):
    for s in json.load(open(f"/work/shared/rules/scenarios/{f}.json")):
        tot+=1
        try:
            got=answers(s)
        except Exception as e:
            import traceback; traceback.print_exc(); print(f,s["name"]); bad+=1; continue
        for st,a in zip(s["steps"],got):
            exp=[(x["id"],x.get("engine","pool#1")) for x in st.get("admitted",[])]
            if exp!=a["admitted"] or a["chosen"]!=st.get("chosen",[]):
                bad+=1
                print(f,s["name"],st["at"],{k:v for k,v in st.items() if k in("do","id")},"expected",exp,st.get("chosen",[]),"got",a); break
print(bad,"bad of",tot)
