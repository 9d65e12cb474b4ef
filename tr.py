import sys
from tests.core.world import World
try: World(int(sys.argv[2]),sys.argv[1],trace=True).run()
except Exception as e: print("END",repr(e)[:300])
