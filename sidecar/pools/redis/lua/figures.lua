-- Rule 1: what each tier may hold, in whole numbers (`figures.py`).

-- `floor(share * whole / 10^12)` without rounding, and whether that is exact. `share` is in millionths of millionths.
local function part(share, whole)
  local s, w = floor(share / PPM), floor(whole / PPM)
  local low = (share % PPM) * (whole % PPM)
  local middle = s * (whole % PPM) + (share % PPM) * w + floor(low / PPM)
  return s * w + floor(middle / PPM), middle % PPM == 0 and low % PPM == 0
end

local function part_of(share, whole, of_unbounded)
  if whole == UNBOUNDED then return of_unbounded end
  return (part(share, whole))
end

local function rounded_up(share, whole)
  if whole == UNBOUNDED then return share > 0 and UNBOUNDED or 0 end
  local found, is_exact = part(share, whole)
  return is_exact and found or found + 1
end

-- The largest request of a tier in one dimension.
local function size_limit(f, tier, d)
  local beside, own = f.C[d], f.R[tier][d]
  local best_level = rules[R_PROMOTE] and min(tier - 1, rules[R_CEILING]) or tier - 1 -- that it can age to
  for q = 1, best_level do beside = beside - f.H[q][d] end
  local most = min(f.L[tier][d], beside)
  if f.C[d] == UNBOUNDED or own == 0 then return most end
  local left = f.C[d]
  for q = 1, #tiers do
    if q ~= tier then left = left - max(f.R[q][d], q < tier and f.H[q][d] or 0) end
  end
  return min(most, max(own, left))
end

local function figures_of(capacity)
  local f = { C = capacity, R = {}, H = {}, L = {}, most_prompt = {}, has_headroom = false }
  for i, tier in ipairs(rules[R_TIERS]) do
    local r, h, l = {}, {}, {}
    for d = 1, 3 do
      h[d] = part_of((PPM - tier[T_LEND]) * tier[T_RESERVE], capacity[d], 0)
      r[d] = rounded_up(tier[T_RESERVE] * rules[R_FAIR], capacity[d])
      if rules[R_BY_GAIN] then r[d] = max(r[d], h[d]) end
      l[d] = part_of(tier[T_LIMIT] * PPM, capacity[d], UNBOUNDED)
      f.has_headroom = f.has_headroom or h[d] > 0
    end
    f.R[i], f.H[i], f.L[i] = r, h, l
  end
  for i = 1, #tiers do f.most_prompt[i] = size_limit(f, i, 3) end
  return f
end
