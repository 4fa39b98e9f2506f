// Puts the page together: routes, keys, colours, the state of the server.

import { getJson, key, onKeyNeeded } from "./api.js";
import { Chat, exportFile } from "./chat.js";
import { ClusterView } from "./cluster.js";
import { imported } from "./conversation.js";
import { ask, notice, say, setUpDialogs } from "./dialogs.js";
import { $, h, icon } from "./dom.js";
import { bytes, percent } from "./format.js";
import { Health } from "./health.js";
import { forget, recall, remember } from "./local.js";
import { buildForm, setModel } from "./settings.js";
import { closeSidebar, drawList, setUpSidebar } from "./sidebar.js";
import * as store from "./store.js";

const MAX_IMPORT_BYTES = 64 * 1024 * 1024;
const SHORTCUTS = [
  ["Enter", "Send the message"],
  ["Shift + Enter", "Begin a new line"],
  ["Escape", "Stop the reply; close what is open"],
  ["Alt + N", "New chat"],
  ["Alt + M", "Go to the message box"],
  ["Alt + P", "System prompt and sampling"],
  ["Alt + K", "This list"],
  ["Arrow keys", "In the heat map: from value to value"],
];

const health = new Health();
let modelId = "default";
const chat = new Chat({ health, model: () => modelId, onList: refreshList });
const cluster = new ClusterView();

async function refreshList() {
  const current = $("cluster").hidden ? chat.conversation.id : null;
  drawList(await store.list(), current, chat.generations);
}

/** Shows what the address says. */
async function route() {
  const [, view, id] = location.hash.split("/");
  const isCluster = view === "cluster";
  $("chat").hidden = isCluster;
  $("cluster").hidden = !isCluster;
  if (isCluster) $("to-cluster").setAttribute("aria-current", "page");
  else $("to-cluster").removeAttribute("aria-current");
  cluster.show(isCluster);
  if (isCluster) {
    document.title = "Cluster – duck-llm";
    $("cluster-title").focus();
  } else {
    if (!(await chat.open(view === "c" && id ? id : null))) {
      notice("This conversation is not in this browser.");
      location.replace("#/");
      return;
    }
    if (matchMedia("(hover: hover)").matches) $("message").focus();
    else $("title").focus();
  }
  await refreshList();
}

function showHealth() {
  const { status, stage, progress } = health.state;
  const wasHidden = $("banner").hidden;
  $("banner").hidden = status === "ok" || status === "unknown";
  $("banner").classList.toggle("error", status === "unreachable");
  $("banner-progress").hidden = status !== "loading" || progress === null;
  if (progress !== null && progress !== undefined) $("banner-progress").value = progress;
  if (status === "unreachable") $("banner-text").textContent = "The server does not answer. It is asked again until it does.";
  if (status === "loading") {
    const share = progress === null ? "" : `, ${percent(progress)}`;
    $("banner-text").textContent = `The model is loading${stage ? `: ${stage}` : ""}${share}. You can write meanwhile.`;
  }
  if (status !== "ok") return;
  if (!wasHidden) say("The server is ready.");
  showModel();
}

async function showModel() {
  try {
    const { data } = await getJson("/v1/models");
    modelId = data[0].id;
    setModel(data[0]);
    const length = data[0].context_length;
    $("model").textContent = length ? `${modelId}, ${length.toLocaleString("en")} tokens of context` : modelId;
  } catch (error) {
    $("model").textContent = error.status === 401 ? "An API key is needed." : "";
  }
}

function setUpColours() {
  const root = document.documentElement;
  for (const radio of document.querySelectorAll("[name=scheme]")) {
    radio.checked = radio.value === (root.dataset.scheme ?? "system");
    radio.addEventListener("change", () => {
      if (radio.value === "system") {
        delete root.dataset.scheme;
        forget("scheme");
      } else {
        root.dataset.scheme = radio.value;
        remember("scheme", radio.value);
      }
      cluster.redraw();
    });
  }
}

function setUpKeys() {
  document.addEventListener("keydown", (event) => {
    const isOpen = document.querySelector("dialog[open], [popover]:popover-open") !== null;
    if (isOpen || event.isComposing || event.defaultPrevented) return;
    if (event.key === "Escape") {
      if (!closeSidebar()) chat.stop();
      return;
    }
    const run = event.altKey && !event.ctrlKey && !event.metaKey && !event.shiftKey && BY_ALT[event.code];
    if (!run) return;
    event.preventDefault();
    run();
  });
}

function goTo(hash) {
  closeSidebar();
  if (hash !== location.hash) history.pushState(null, "", hash);
  route(); // now, as what is typed next belongs there; a change of location.hash is told later
  $("message").focus();
}

const openSettings = () => $("settings").showModal();
const openShortcuts = () => $("shortcuts").showModal();
const BY_ALT = {
  KeyN: () => goTo("#/"),
  KeyM: () => goTo($("cluster").hidden ? location.hash : chat.hash),
  KeyP: openSettings,
  KeyK: openShortcuts,
};

function setUpData() {
  const refresh = async () => {
    const used = await store.usage();
    $("usage").textContent = used === null ? "" : `They take ${bytes(used)}.`;
    $("key-state").textContent = key.get() ? "A key is kept in this browser." : "No key is kept. The page asks when the server wants one.";
    $("forget-key").disabled = !key.get();
  };
  $("open-data").addEventListener("click", () => {
    refresh();
    $("data").showModal();
  });
  $("export-all").addEventListener("click", async () => {
    const heads = await store.list();
    exportFile(await Promise.all(heads.map(({ id }) => store.load(id))), "duck-llm conversations");
  });
  $("import").addEventListener("change", () => importFile($("import")));
  $("delete-all").addEventListener("click", async () => {
    const heads = await store.list();
    const isSure = await ask({ title: "Delete all conversations?", text: `${heads.length} will be gone for good.`, yes: "Delete all", danger: true });
    if (!isSure) return;
    for (const { id } of heads) await chat.forget(id);
    $("data").close();
    location.hash = "#/";
  });
  $("change-key").addEventListener("click", async () => {
    const given = await ask({ title: "API key", label: "Key", type: "password", yes: "Keep" });
    if (given !== null) key.set(given);
    await refresh();
    if (given !== null) showModel();
  });
  $("forget-key").addEventListener("click", () => {
    key.forget();
    refresh();
  });
}

async function importFile(input) {
  const [file] = input.files;
  input.value = "";
  if (!file) return;
  try {
    if (file.size > MAX_IMPORT_BYTES) throw new Error(`it has ${bytes(file.size)}, and ${bytes(MAX_IMPORT_BYTES)} is the most`);
    const { format, conversations } = JSON.parse(await file.text());
    if (format !== "duckllm-conversations" || !Array.isArray(conversations)) throw new Error("it is no export of this page");
    const found = conversations.map(imported).filter((conversation) => conversation !== null);
    for (const conversation of found) await store.save(conversation);
    const left = conversations.length - found.length;
    notice(`${found.length} imported${left ? `, ${left} left out, as they are damaged` : ""}.`);
    await refreshList();
  } catch (error) {
    notice(`The file was not imported: ${error instanceof SyntaxError ? "it is no JSON" : error.message}.`, true);
  }
}

function setUpButtons() {
  const glyphs = {
    "new-chat": "plus", "to-cluster": "nodes", "open-data": "box", "open-shortcuts": "keyboard", rename: "edit",
    export: "save", delete: "trash", "open-settings": "sliders", "open-menu": "more", "close-sidebar": "close",
  };
  for (const [id, name] of Object.entries(glyphs)) {
    const slot = $(id).querySelector(".glyph");
    if (slot) slot.replaceWith(icon(name));
    else $(id).append(icon(name));
  }
  for (const button of document.querySelectorAll(".open-sidebar")) button.append(icon("menu"));
  for (const [keys, what] of SHORTCUTS) {
    const parts = keys.split(" + ").flatMap((part, at) => [at ? " + " : null, h("kbd", {}, part)]);
    $("shortcut-list").append(h("div", {}, h("dt", {}, ...parts), h("dd", {}, what)));
  }
  const inMenu = (run) => () => {
    $("menu").hidePopover();
    run();
  };
  $("rename").addEventListener("click", inMenu(() => chat.rename()));
  $("export").addEventListener("click", inMenu(() => chat.export()));
  $("delete").addEventListener("click", inMenu(async () => (await chat.remove()) && goTo("#/")));
  $("open-settings").addEventListener("click", openSettings);
  $("open-shortcuts").addEventListener("click", openShortcuts);
  $("new-chat").addEventListener("click", () => $("message").focus());
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    $("message").focus();
  });
}

async function start() {
  setUpButtons();
  setUpDialogs();
  setUpSidebar();
  setUpColours();
  setUpKeys();
  setUpData();
  buildForm((settings) => chat.changeSettings(settings));
  onKeyNeeded((wasRefused) =>
    ask({
      title: "API key",
      text: wasRefused ? "The server does not take the key that is kept. Enter another." : "The server wants a key. It is kept in this browser until you forget it.",
      label: "Key",
      type: "password",
      yes: "Keep and go on",
    }),
  );
  health.addEventListener("change", showHealth);
  health.watch();
  if (!(await store.open())) notice("This browser keeps nothing for this page: conversations end with it.", true);
  window.addEventListener("hashchange", route);
  await route();
}

start();
