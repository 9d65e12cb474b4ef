"use strict";
// Draws the events of `overview/stream`. Everything is written as text (textContent) or as a number, never as markup: names
// and messages come from requests. Nodes are kept from one second to the next, so that focus and selection are, too.

const RULES = { always_first: "always first", reserve: "its reserve", reserve_turn: "its turn", level: "more important", gain: "earns more in time", limit: "this one at its limit", guarded: "kept for an SLO", passed_over: "too large to wait for", claim: "waiting for its engine" };
const CUT_AFTER_MS = 5000;
const at = (id) => document.getElementById(id);

// -- figures as people read them (the same as cluster/phrases.py)

function duration(s) {
  return words(s).replaceAll(" ", "\u00a0");
}

function words(s) {
  if (s < 0.9995) return `${Math.round(s * 1000)} ms`;
  if (s < 9.95) return `${s.toFixed(1)} s`;
  const whole = Math.round(s);
  if (whole < 60) return `${whole} s`;
  const two = (n) => String(n).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} m ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} m`;
}

function count(n) {
  for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (n >= size * 10 || (n >= size && letter !== "k")) {
      return (n / size).toFixed(n < 100 * size ? 1 : 0).replace(/\.0$/, "") + letter;
    }
  }
  return n.toLocaleString("en");
}

const share = (part, whole) => (whole ? `${(100 * part / whole).toFixed(0)}%` : "");
const clock = (s) => new Date(s * 1000).toLocaleTimeString([], { hour12: false });

// -- nodes

function make(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function cell(className, label, ...children) {
  const node = make("td", className, ...children);
  node.setAttribute("role", "cell");
  if (label) node.dataset.label = label;
  return node;
}

function row(...cells) {
  const node = make("tr", "", ...cells);
  node.setAttribute("role", "row");
  return node;
}

function head(...children) {
  const node = make("th", "", ...children);
  node.scope = "row";
  node.setAttribute("role", "rowheader");
  return node;
}

function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Makes the children of `parent` those of `items`, in order; a child stays as long as its key does.
function keep(parent, items, key, create, update) {
  const before = parent.kept || new Map();
  const after = new Map();
  let cursor = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    const child = before.get(name) || create(item);
    before.delete(name);
    after.set(name, child);
    update(child, item);
    if (child === cursor) cursor = cursor.nextElementSibling;
    else parent.insertBefore(child, cursor);
  }
  for (const child of before.values()) child.remove();
  parent.kept = after;
}

const color = (tier) => `t${tier.level % 6}`;

// -- the pool

function bars(overview) {
  const first = binding(overview);
  const dimensions = [first, first === "tokens" ? "requests" : "tokens"].filter((name) => overview.capacity[name] !== null);
  keep(at("bars"), dimensions, (name) => name, makeBar, (node, name) => updateBar(node, name, overview));
  keep(at("key"), overview.tiers, (tier) => tier.tier, makeKey, (node, tier) => {
    put(node.parts.figure, ` ${count(tier.held.tokens)} tokens, ${count(tier.held.requests)} running`);
  });
}

function makeBar(name) {
  const held = make("div", "held"), reserves = make("div", "reserves"), said = make("p", "said");
  held.setAttribute("role", "img");
  reserves.setAttribute("role", "img");
  const node = make("div", "bar", make("span", "", name === "tokens" ? "Tokens" : "Requests"), held,
    make("span", "small", "reserved"), reserves, said);
  node.parts = { held, reserves, said };
  return node;
}

function updateBar(node, name, overview) {
  const whole = Math.max(overview.capacity[name], overview.held[name], 1);
  const { held, reserves, said } = node.parts;
  keep(held, overview.tiers, (tier) => tier.tier, (tier) => {
    const label = make("span", "", tier.tier), beyond = make("i", "");
    const part = make("div", `part ${color(tier)}`, label, beyond);
    part.parts = { label, beyond };
    return part;
  }, (part, tier) => {
    const has = tier.held[name], reserve = tier.reserve[name] || 0;
    part.style.width = `${100 * has / whole}%`;
    const plain = held.clientWidth * (has > reserve && reserve ? reserve : has) / whole;
    part.parts.label.hidden = plain < 8 * tier.tier.length + 14;  // else it would be cut, or crossed by the mark
    part.parts.beyond.hidden = has <= reserve || reserve === 0;
    part.parts.beyond.style.width = has ? `${100 * (has - reserve) / has}%` : "0";
    part.hidden = has === 0;
    part.title = `${tier.tier} holds ${count(has)} ${name}, reserve ${count(reserve)}`;
  });
  keep(reserves, overview.tiers, (tier) => tier.tier, (tier) => make("div", `part ${color(tier)}`), (part, tier) => {
    part.style.width = `${100 * (tier.reserve[name] || 0) / whole}%`;
    part.hidden = !tier.reserve[name];
    part.title = `${tier.tier}: reserve ${count(tier.reserve[name] || 0)} ${name}`;
  });
  const list = (of) => overview.tiers.map((tier) => `${tier.tier} ${count(tier[of][name] || 0)}`).join(", ");
  held.setAttribute("aria-label", `${name} held: ${list("held")}; free ${count(overview.free[name])}`);
  reserves.setAttribute("aria-label", `${name} reserved: ${list("reserve")}`);
  const has = count(overview.held[name]), most = overview.capacity[name];
  put(said, most ? `${has} of ${count(most)} held (${share(overview.held[name], most)}), ${count(overview.free[name])} free` :
    `${has} held, and nothing may be added`);
}

function makeKey(tier) {
  const figure = make("span", "soft");
  const node = make("li", "", make("span", `mark ${color(tier)}`), make("b", "", tier.tier), figure);
  node.parts = { figure };
  return node;
}

// -- the tiers

function makeTier(tier) {
  const parts = {};
  for (const name of ["held", "figures", "queued", "tokens", "oldest", "starved", "ahead", "most"]) parts[name] = make("div");
  for (const name of ["figures", "tokens", "ahead", "most"]) parts[name].className = "small";
  parts.promises = make("ul", "promises");
  parts.gain = make("div", "promises");
  parts.guarded = make("div", "promises");
  parts.by = make("ul", "by");
  parts.fill = make("div");
  parts.reserve = make("i", "reserve");
  parts.limit = make("i", "limit");
  parts.gauge = make("div", `gauge ${color(tier)}`, parts.fill, parts.reserve, parts.limit);
  parts.gauge.setAttribute("aria-hidden", "true");
  parts.spark = makeSpark(parts);
  parts.queuedCell = cell("", "Queued", parts.queued, parts.tokens);
  parts.oldestCell = cell("", "Oldest waiter", parts.oldest, parts.starved, parts.ahead);
  parts.byCell = cell("", "Overtaken, last 5 min", parts.by);
  const node = row(
    head(make("span", `mark ${color(tier)}`), make("span", "name", tier.tier), parts.promises, parts.gain, parts.guarded),
    cell("", "Holds", parts.held, parts.gauge, parts.figures),
    parts.queuedCell, parts.oldestCell, parts.byCell,
    cell("", "Waits, last 5 min", parts.spark, parts.most));
  node.parts = parts;
  return node;
}

function updateTier(node, tier, overview) {
  holds(node.parts, tier, overview);
  waits(node.parts, tier);
  overtaken(node.parts, tier);
  spark(node.parts, tier);
  promises(node.parts, tier);
}

// The dimension that binds: the pool has less left of it, as a part. One for all rows, and the same one until the other
// binds clearly more, so that the unit does not flicker.
let binds = "tokens";

function binding(overview) {
  const part = (name) => (overview.capacity[name] === null ? -1 : overview.held[name] / (overview.capacity[name] || 1));
  const other = binds === "tokens" ? "requests" : "tokens";
  if (part(other) > part(binds) + (part(binds) < 0 ? 0 : 0.1)) binds = other;
  return binds;
}

function holds(parts, tier, overview) {
  const name = binds;
  const other = name === "tokens" ? "requests" : "tokens";
  const unit = { tokens: "tokens", requests: "running" };
  const figure = (of) => {
    const part = share(tier.held[of], overview.capacity[of]);
    return `${count(tier.held[of])} ${unit[of]}${part && ` (${part})`}`.replaceAll(" ", "\u00a0");
  };
  const whole = overview.capacity[name], has = tier.held[name];
  const reserve = tier.reserve[name], limit = tier.limit[name];
  put(parts.held, figure(name));
  parts.gauge.hidden = whole === null;
  const place = (figure) => `${Math.min(100, 100 * figure / (whole || 1))}%`;
  parts.fill.style.width = place(has);
  parts.reserve.hidden = !reserve;
  parts.reserve.style.left = place(reserve || 0);
  parts.limit.hidden = limit === null || limit >= whole;
  parts.limit.style.left = place(limit || 0);
  const figures = [];
  if (whole !== null && reserve) figures.push(`reserve ${count(reserve)}`);
  if (!parts.limit.hidden) figures.push(`limit ${count(limit)}`);
  if (tier.borrowed_tokens) figures.push(`borrows ${count(tier.borrowed_tokens)} tokens`);
  if (tier.lent_tokens) figures.push(`lends ${count(tier.lent_tokens)} tokens`);
  figures.push(figure(other));
  const sum = (name) => tier.recent.reduce((total, bucket) => total + bucket[name], 0);
  const preempted = sum("preempted");
  if (preempted) figures.push(`preempted ${count(preempted)}\u00d7 in 5 min, ${duration(sum("engine_lost_s"))} at the engine lost`);
  put(parts.figures, figures.join(", "));
}

function waits(parts, tier) {
  const queued = tier.queued.requests, oldest = tier.oldest;
  put(parts.queued, queued ? `${count(queued)}\u00a0request${queued === 1 ? "" : "s"}` : "none");
  put(parts.tokens, queued ? `${count(tier.queued.tokens)} tokens` : "");
  parts.queued.className = queued ? "" : "soft";
  put(parts.oldest, oldest ? `waits ${duration(oldest.wait_s)}` : "none waits");
  parts.oldest.className = oldest ? "" : "soft";
  const starved = oldest && oldest.starvation_s >= 0.05;
  put(parts.starved, starved ? tier.is_at_limit ? "at its own limit" : `starved ${duration(oldest.starvation_s)}` : "");
  parts.starved.className = tier.is_at_limit ? "small" : "starves";
  const ahead = oldest ? Object.entries(oldest.served_ahead).sort((a, b) => b[1] - a[1]).slice(0, 3) : [];
  put(parts.ahead, ahead.length ? `went ahead: ${ahead.map(([name, n]) => `${name} ${count(n)}`).join(", ")} tokens` : "");
}

function overtaken(parts, tier) {
  const by = Object.entries(tier.overtaken_by).sort((a, b) => b[1].requests - a[1].requests);
  parts.byCell.classList.toggle("quiet", by.length === 0);
  keep(parts.by, by.length ? by : [["", null]], ([name]) => name, () => make("li"), (node, [name, counted]) => {
    if (counted === null) return void (node.className = "soft", put(node, "none"));
    const rules = Object.entries(counted.rules).filter(([, often]) => often >= 0.1 * counted.requests)
      .sort((a, b) => b[1] - a[1]).map(([rule]) => RULES[rule] || rule);
    put(node, `by ${name} ${count(counted.requests)}\u00d7 (${rules.join(", ")})`);
  });
}

// -- the last five minutes: a step for each five seconds, starvation drawn as the lower part of the wait

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300, HEIGHT = 40;

function makeSpark(parts) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", "spark");
  svg.setAttribute("role", "img");
  for (const [name, tag] of [["w", "path"], ["s", "path"], ["p", "line"], ["base", "line"]]) {
    parts[name] = document.createElementNS(SVG, tag);
    parts[name].setAttribute("class", name);
    svg.append(parts[name]);
  }
  line(parts.base, HEIGHT - 0.5);
  return svg;
}

function line(node, y) {
  for (const [name, value] of [["x1", 0], ["x2", WIDTH], ["y1", y], ["y2", y]]) node.setAttribute(name, value);
}

function spark(parts, tier) {
  const waits = tier.recent.map((bucket) => bucket.wait_max_s);
  const starved = tier.recent.map((bucket) => bucket.starvation_max_s);
  const most = Math.max(...waits, 0), promised = tier.slo.queue_wait_s;
  const top = Math.max(most, promised !== null && promised <= 3 * most ? promised : 0, 0.001) * 1.08;
  const y = (value) => (HEIGHT - HEIGHT * value / top).toFixed(2);
  const steps = (values) => values.map((value, index) => value ?
    `M${index * WIDTH / values.length} ${HEIGHT}V${y(value)}h${(WIDTH / values.length - 0.6).toFixed(2)}V${HEIGHT}z` : "").join("");
  parts.w.setAttribute("d", steps(waits));
  parts.s.setAttribute("d", steps(starved));
  const shows = promised !== null && promised < top;
  line(parts.p, shows ? y(promised) : -9);
  const worst = Math.max(...starved, 0);
  const said = most ? `up to ${duration(most)}${worst ? `, starved ${duration(worst)}` : ""}` : "none waited";
  put(parts.most, said);
  parts.spark.setAttribute("aria-label", `last 5 minutes: ${said}`);
}

// -- what was promised, and whether it was kept in the last five minutes

function promises(parts, tier) {
  const most = (name) => Math.max(...tier.recent.map((bucket) => bucket[name]), 0);
  const found = [
    ["first token", tier.slo.ttft_s, most("ttft_max_s")],
    ["wait", tier.slo.queue_wait_s, most("wait_max_s")],
    ["starvation", tier.slo.starvation_s, most("starvation_max_s")],
  ].filter(([, promised]) => promised !== null);
  gain(parts, tier);
  keep(parts.promises, found, ([name]) => name, () => make("li"), (node, [name, promised, seen]) => {
    const broken = seen > promised;
    node.className = broken ? "broken" : "";
    const bound = duration(promised).replace(/\u00a000\u00a0[sm]$|\.0(?=\u00a0s)/, "");
    put(node, broken ? `\u2717 ${name} ${duration(seen)}, promised ${bound}` : `\u2713 ${name} within ${bound}`);
  });
}

// Requests and tokens that came as promised, of all that ended: refused and abandoned ones count.
function gain(parts, tier) {
  const sum = (name) => tier.recent.reduce((total, bucket) => total + bucket[name], 0);
  const offered = sum("offered"), attainable = sum("gain_attainable");
  const met = `${share(sum("met"), offered)} of ${count(offered)} as promised`;
  put(parts.guarded, tier.guarded);
  put(parts.gain, offered ? `${met}${attainable ? `, ${share(sum("gain_earned"), attainable)} of tokens in time` : ""}` : "");
}

// -- the engines of a pool of several

const UNUSABLE = new Set(["suspect", "down", "unreachable"]);

function engines(overview) {
  at("engines-section").hidden = overview.engines.length === 0;
  keep(at("engine-rows"), overview.engines, (engine) => engine.id, makeEngine, updateEngine);
}

function makeEngine(engine) {
  const parts = {};
  for (const name of ["state", "reason", "elsewhere", "held", "figures"]) parts[name] = make("div");
  parts.reason.className = parts.figures.className = "small";
  parts.elsewhere.className = "differs";
  parts.fill = make("div");
  parts.gauge = make("div", "gauge soft", parts.fill);
  parts.gauge.setAttribute("aria-hidden", "true");
  const [, , number] = engine.id.match(/^(.*)#(\d+)$/) || ["", "", ""];
  const incarnation = make("span", "soft", number && number !== "1" ? ` #${number}` : "");
  const labels = ["Un-prefilled", "Claims", "In flight", "Prefix hits"];
  parts.numbers = labels.map((label) => cell("number", label));
  const node = row(head(make("span", "name", engine.name), incarnation),
    cell("why", "State", parts.state, parts.reason, parts.elsewhere),
    cell("", "Holds", parts.held, parts.gauge, parts.figures), ...parts.numbers);
  node.parts = parts;
  return node;
}

function updateEngine(node, engine) {
  const { state, reason, elsewhere, held, figures, gauge, fill, numbers } = node.parts;
  put(state, engine.state);
  state.className = UNUSABLE.has(engine.state) ? "starves" : engine.state === "ready" ? "" : "differing";
  put(reason, engine.reason);
  put(elsewhere, engine.elsewhere);
  const figure = (name, unit) => {
    const has = engine.held[name], most = engine.capacity[name];
    return (most === null ? `${count(has)} ${unit}` : `${count(has)} of ${count(most)} ${unit}`).replaceAll(" ", "\u00a0");
  };
  put(held, figure("tokens", "tokens"));
  put(figures, figure("requests", "requests"));
  const whole = engine.capacity.tokens;
  gauge.hidden = !whole;
  fill.style.width = `${Math.min(100, 100 * engine.held.tokens / (whole || 1))}%`;
  const hits = engine.hit_rate === null ? "\u2013" : `${engine.is_measured ? "" : "~"}${(100 * engine.hit_rate).toFixed(0)}%`;
  const said = [count(engine.unprefilled_tokens), count(engine.claims), count(engine.in_flight), hits];
  said.forEach((text, index) => put(numbers[index], text));
}

// -- how fast the engines are, where tokens have deadlines

function engineSpeeds(overview) {
  at("speeds-section").hidden = overview.engine_speeds.length === 0;
  keep(at("speed-rows"), overview.engine_speeds, (speed) => speed.engine || "", makeSpeed, (node, speed) => updateSpeed(node, speed, overview));
}

function makeSpeed() {
  const parts = { name: make("span", "name"), source: make("div") };
  const labels = ["Prompt token", "Output token", "Between tokens", "Error, first token", "Error, between tokens"];
  parts.numbers = labels.map((label) => cell("number", label));
  const node = row(head(parts.name), cell("", "Source", parts.source), ...parts.numbers);
  node.parts = parts;
  return node;
}

function updateSpeed(node, speed, overview) {
  const { name, source, numbers } = node.parts;
  put(name, speed.engine || overview.engine);
  put(source, speed.is_known ? "measured" : "stated defaults, in part");
  source.className = speed.is_known ? "" : "soft";
  const error = (part) => (part === null ? "\u2013" : share(part, 1));
  const said = [tiny(speed.prefill_ns), tiny(speed.output_ns), tiny(1000 * speed.token_us), error(speed.first_error), error(speed.token_error)];
  said.forEach((text, index) => put(numbers[index], text));
}

function tiny(ns) {
  const [figure, unit] = ns < 1e6 ? [ns / 1e3, "\u00b5s"] : ns < 1e9 ? [ns / 1e6, "ms"] : [ns / 1e9, "s"];
  return `${figure < 9.95 ? figure.toFixed(1) : Math.round(figure)}\u00a0${unit}`;
}

// -- what leases hold and use, where output lengths are learned

function leaseSizes(overview) {
  at("sizes-section").hidden = overview.lease_sizes.length === 0;
  keep(at("size-rows"), overview.lease_sizes, (sizes) => sizes.engine || "", makeSizes, (node, sizes) => updateSizes(node, sizes, overview));
}

function makeSizes() {
  const parts = {};
  for (const name of ["held", "quantile", "reason"]) parts[name] = make("div");
  parts.name = make("span", "name");
  parts.fill = make("div");
  parts.gauge = make("div", "gauge soft", parts.fill);
  parts.gauge.setAttribute("aria-hidden", "true");
  const labels = ["Overlap", "Expected", "Growths", "Preempted by the engine"];
  parts.numbers = labels.map((label) => cell("number", label));
  const node = row(head(parts.name), cell("", "Held and used", parts.held, parts.gauge),
    cell("why", "Quantile", parts.quantile, parts.reason), ...parts.numbers);
  node.parts = parts;
  return node;
}

function updateSizes(node, sizes, overview) {
  const { name, held, gauge, fill, quantile, reason, numbers } = node.parts;
  const used = sizes.used_tokens, has = sizes.held_tokens;
  put(name, sizes.engine || overview.engine);
  put(held, has ? `${count(has)} tokens held, ${count(used)} used (${share(used, has)})` : "nothing held");
  gauge.hidden = !has;
  fill.style.width = `${Math.min(100, 100 * used / (has || 1))}%`;
  put(quantile, `${Number((100 * sizes.quantile).toFixed(2))}%`);
  quantile.className = sizes.is_raised ? "differing" : "";
  put(reason, sizes.reason);
  reason.className = "small";
  const preempted = sizes.preemptions === null ? "\u2013" : count(sizes.preemptions);
  const said = [sizes.overlap.toFixed(2), count(sizes.expected_tokens), count(sizes.growths), preempted];
  said.forEach((text, index) => put(numbers[index], text));
}

// -- tenants, replicas, refusals

function tenants(overview) {
  keep(at("tenant-rows"), overview.tenants, (tenant) => tenant.tenant, (tenant) => {
    const node = row(head(tenant.tenant), ...[0, 1, 2].map(() => cell("number")));
    return node;
  }, (node, tenant) => {
    const figures = [tenant.tokens_held, tenant.leases, tenant.waiting];
    figures.forEach((figure, index) => put(node.children[index + 1], count(figure)));
  });
  at("no-tenants").hidden = overview.tenants.length > 0;
}

function replicas(overview) {
  keep(at("replica-rows"), overview.replicas, (replica) => replica.replica, (replica) => {
    const own = replica.replica === overview.replica ? " (this one)" : "";
    const id = make("span", "id soft", ` ${replica.replica.slice(0, 8)}`);
    const differs = make("span", "differs");
    const node = row(head(replica.host, id, own, differs), ...[0, 1, 2].map(() => cell("number")));
    node.differs = differs;
    return node;
  }, (node, replica) => {
    const isAnother = replica.generation && replica.generation !== overview.generation;
    const lacks = replica.engine && replica.engine.reason ? ` engine\u00a0${replica.engine.state}` : "";
    put(node.differs, (isAnother ? ` policy\u00a0${replica.generation}` : "") + lacks);
    put(node.children[1], count(replica.leases));
    put(node.children[2], count(replica.waiting));
    put(node.children[3], replica.seen_s_ago < 0.1 ? "now" : `${replica.seen_s_ago.toFixed(0)} s ago`);
  });
}

// A flood of the same refusal is one line, of its newest request, with how often it came.
function grouped(refusals) {
  const groups = new Map();
  for (const refusal of refusals) {
    const key = JSON.stringify([refusal.tier, refusal.tenant, refusal.code, refusal.message]);
    const group = groups.get(key) || { key, newest: refusal, times: 0 };
    group.times += 1;
    groups.set(key, group);
  }
  return [...groups.values()];
}

function refusals(overview) {
  keep(at("refusal-rows"), grouped(overview.refusals), ({ key, newest }) => `${key} ${newest.request_id} ${newest.at_s}`, ({ newest }) => {
    const who = newest.tier === null ? "not known" : `${newest.tier}, ${newest.tenant}${newest.key ? `, key ${newest.key}` : ""}`;
    const status = newest.status === null ? "" : ` (${newest.status})`;
    const times = make("span", "soft");
    const gaveWay = newest.preempted ? `, preempted ${newest.preempted}\u00d7` : "";
    const why = cell("why", "", make("span", "code", newest.code), status, times, gaveWay, `: ${newest.message}`);
    const waited = newest.waited_s ? duration(newest.waited_s) : "\u2013";
    const node = row(cell("", "", clock(newest.at_s)), cell("why", "", who), why,
      cell(newest.waited_s ? "number" : "number nothing", "", waited), cell("id", "", request(newest)));
    node.times = times;
    return node;
  }, (node, { times }) => put(node.times, times > 1 ? `, ${times}\u00d7 lately` : ""));
  at("no-refusals").hidden = overview.refusals.length > 0;
  at("refusals").hidden = overview.refusals.length === 0;
}

function request(refusal) {
  const short = refusal.request_id.length > 20 ? `${refusal.request_id.slice(0, 18)}\u2026` : refusal.request_id;
  const link = make("a", "", short);
  link.href = `request?id=${encodeURIComponent(refusal.request_id)}`;
  link.title = `why ${refusal.request_id} was refused`;
  return link;
}

// -- what the heads of columns mean, and how old or whose the figures of a table are

for (const link of document.querySelectorAll("th a")) {
  link.title = at(link.hash.slice(1)).nextElementSibling.textContent;
}

function ages(overview) {
  const oldest = Math.max(...overview.replicas.map((replica) => replica.seen_s_ago), 0);
  const said = oldest < 0.95 ? "" : `, up to ${Math.ceil(oldest)}\u00a0s old`;
  for (const node of document.querySelectorAll(".age")) put(node, said);
  const own = overview.replicas.length > 1 ? ", of this replica" : "";
  for (const node of document.querySelectorAll(".here")) put(node, own);
}

// -- all of it

let lastSaid = "";

function show(overview) {
  put(at("pool"), overview.pool);
  const alarm = overview.lacks_engine ? "no engine" : overview.starving && `${overview.starving} starves`;
  document.title = `${alarm || "Admission"} \u2013 ${overview.pool}`;
  const several = overview.engines.length;
  const facts = [several ? `${new Set(overview.engines.map((engine) => engine.name)).size} engines of ${overview.engine}` : `engine ${overview.engine}`, `policy ${overview.generation}`];
  facts.push(where(overview));
  put(at("facts"), facts.join(" \u00b7 "));
  put(at("headline"), overview.headline);
  const waits = overview.tiers.some((tier) => tier.oldest);
  at("headline").className = alarm ? "alarm" : waits ? "waits" : "calm";
  keep(at("notices"), [...new Set(overview.notices)], (notice) => notice, (notice) => make("li", "", notice), () => {});
  bars(overview);
  keep(at("tier-rows"), overview.tiers, (tier) => tier.tier, makeTier, (node, tier) => updateTier(node, tier, overview));
  engines(overview);
  engineSpeeds(overview);
  leaseSizes(overview);
  tenants(overview);
  replicas(overview);
  refusals(overview);
  ages(overview);
  say(alarm || (waits ? "none starves" : "none waits"));
}

// Without its store, a replica shows itself alone: a notice says so, and why.
function where(overview) {
  if (overview.mode === "local") return "one process";
  if (overview.store.state !== "shared") return `replica ${overview.replica.slice(0, 8)}`;
  const replicas = overview.replicas.length;
  return `store shared, ${replicas} replica${replicas === 1 ? "" : "s"}`;
}

// For screen readers: only what changed, not every second's figures.
function say(text) {
  if (text !== lastSaid) put(at("said"), lastSaid = text);
}

// -- the connection

let source = null, lastMessage = 0;

function connect() {
  if (source) source.close();
  source = new EventSource("overview/stream");
  source.onmessage = (event) => {
    lastMessage = Date.now();
    const overview = JSON.parse(event.data);
    show(overview);
    state("live", `live, ${clock(overview.at_s)}`);
  };
  source.onerror = () => cut();
}

function cut() {
  const since = lastMessage ? ` since ${clock(lastMessage / 1000)}` : "";
  state("cut", `no connection${since}, trying again`);
  say("the connection is cut");
}

function state(name, text) {
  at("link").className = name;
  put(at("link-text"), text);
  at("main").classList.toggle("stale", name === "cut");
}

setInterval(() => {  // a stream may also fall silent without an error, and a browser gives up after some
  if (document.hidden || Date.now() - lastMessage < CUT_AFTER_MS) return;
  if (lastMessage) cut();
  connect();
}, CUT_AFTER_MS / 2);

document.addEventListener("visibilitychange", () => {  // not visible: the server need not send
  if (document.hidden && source) source.close();
  else connect();
});

connect();
