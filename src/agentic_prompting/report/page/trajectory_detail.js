// One trajectory: its row in the list, and its content when it is open.

/** The row of a trajectory in the list. */
function describeTrajectory(columns, item) {
  const { text, isGood } = describeOutcome(columns, item);
  const reward = `reward ${formatNumber(columns.reward[item])}`;
  const advantage = formatAdvantage(columns.advantage[item]);
  const turns = formatCount(columns.turns[item], "turn");
  return {
    title: toOneLine(columns.title[item]) || "(no question)",
    details: [
      `step ${columns.step[item]} · `,
      el("span", { class: isGood ? "good" : "bad", text }),
      ` · ${reward}${advantage} · ${turns}`,
    ],
  };
}

/** How a trajectory ended, in words; an answer is right or wrong where that is known. */
function describeOutcome(columns, item) {
  const status = columns.status[item];
  const match = columns.match[item];
  const isAnswered = status === "answered";
  if (!isAnswered || match === null) return { text: toWords(status), isGood: isAnswered };
  return match ? { text: "✓ right", isGood: true } : { text: "✗ wrong", isGood: false };
}

function formatAdvantage(advantage) {
  if (!advantage) return "";
  const sign = advantage > 0 ? "+" : "";
  return ` (${sign}${advantage.toFixed(2)})`;
}

/** The nodes of an open trajectory; `group` is the table of its group, or null. */
function renderTrajectory(columns, item, trajectory, group) {
  const content = [
    el("h3", { text: "Question" }),
    renderText(trajectory.question ?? ""),
    renderFacts(columns, item, trajectory),
  ];
  if (trajectory.answers) {
    content.push(renderField("accepted", trajectory.answers.join(" / ")));
    content.push(renderField("answered", trajectory.answer ?? "nothing"));
  }
  if (trajectory.returned) {
    content.push(el("h3", { text: "What the program returned besides" }));
    content.push(renderText(trajectory.returned));
  }
  if (trajectory.error) {
    const { kind, what } = trajectory.error;
    content.push(el("p", { class: "bad" }, "Failed, and left out of training: "));
    content.push(renderText(`${kind}: ${what}`));
  }

  let reward = null;
  if (trajectory.parts.length) {
    const parts = renderTable(["part", "value"], trajectory.parts);
    reward = el("div", {}, el("h3", { text: "Reward" }), parts);
  }
  content.push(el("div", { class: "reward-and-group" }, reward, group));
  content.push(el("h3", { text: "Conversation" }), ...renderConversation(trajectory));
  return content;
}

/** The line below the question: outcome, step, tokens, cost, seed and address. */
function renderFacts(columns, item, trajectory) {
  const status = columns.status[item];
  const { agent, observation } = trajectory.tokens ?? {};
  const facts = [
    `${columns.mode[item]}, step ${columns.step[item]}`,
    `${agent ?? "–"} tokens of the agent, ${observation ?? "–"} of replies`,
  ];
  if (trajectory.cost_usd) facts.push(formatDollars(trajectory.cost_usd));
  facts.push(`seed ${trajectory.seed ?? "–"}`);

  const style = joinClasses("tag", status !== "answered" && "bad");
  return el(
    "p",
    { class: "note" },
    el("span", { class: style, text: toWords(status) }),
    ` · ${facts.join(" · ")} · `,
    el("a", { href: `#rollout-${columns.number[item]}`, text: "link to this one" }),
  );
}

/** A name and a short text on one line. */
function renderField(name, text) {
  const shortText = toOneLine(text).slice(0, 500);
  return el(
    "p",
    { class: "note field" },
    `${name}: `,
    el("bdi", { class: "text", text: shortText }),
  );
}

/**
 * The rollouts of the same question in the same step, which GRPO compares with each other; null
 * if there is no other one. `setFilters` filters the list of trajectories.
 */
function renderGroup(columns, item, setFilters) {
  const group = columns.group[item];
  const members = [];
  columns.group.forEach((otherGroup, other) => {
    if (otherGroup === group) members.push(other);
  });
  if (members.length < 2) return null;

  const rows = members.map((member) => [
    member === item
      ? "this one"
      : el("a", { href: `#rollout-${columns.number[member]}`, text: "read" }),
    columns.reward[member],
    columns.advantage[member],
    toWords(columns.status[member]),
  ]);
  const table = renderTable(["", "reward", "advantage", "outcome"], rows);
  table.classList.add("group-table");
  const button = el("button", {
    type: "button",
    text: `Show these ${members.length} alone`,
    onclick: () => setFilters({ group: String(group) }),
  });
  return el("div", { class: "group" }, el("h3", { text: "Its group" }), table, button);
}

/** The turns of the agent and what it got in return, in order. */
function renderConversation(trajectory) {
  const { first_request: firstRequest, turns, observations } = trajectory;
  // A program makes the first request; an environment only replies.
  const partner = firstRequest ? "program" : "environment";
  const messages = [];
  if (firstRequest) {
    messages.push(
      renderMessage({
        speaker: partner,
        remark: "first request",
        text: firstRequest,
        isReply: true,
      }),
    );
  }
  turns.forEach((turn, index) => {
    messages.push(renderTurn(turn, index));
    const observation = observations[index];
    if (observation) messages.push(renderObservation(observation, partner));
  });
  return messages;
}

function renderTurn(turn, index) {
  let remark = `turn ${index + 1}`;
  if (!turn.well_formed) remark += " · not well formed";
  if (!turn.well_formed && turn.problem) remark += `: ${turn.problem}`;
  return renderMessage({ speaker: "agent", remark, text: turn.text, marksTags: true });
}

function renderObservation(observation, partner) {
  const isFailed = Boolean(observation.error);
  const source = observation.cached ? ", recorded" : "";
  return renderMessage({
    speaker: isFailed ? `${partner} failed` : partner,
    remark: `${formatNumber(observation.seconds, 2)} s${source}`,
    text: observation.error ?? observation.text,
    isReply: true,
    isFailed,
  });
}

/** What somebody wrote, below their name and a remark on it. */
function renderMessage({
  speaker,
  remark,
  text,
  isReply = false,
  isFailed = false,
  marksTags = false,
}) {
  const style = joinClasses("message", isReply && "reply", isFailed && "failed");
  return el(
    "div",
    { class: style },
    el("div", { class: "speaker" }, speaker, el("span", { text: remark })),
    renderText(text, { marksTags }),
  );
}
