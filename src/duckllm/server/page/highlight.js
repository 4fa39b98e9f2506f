// Colours for code: comments, strings, numbers, common keywords of some families.
// Where it does not know better the code stays as it is; the text is the same in any case.

import { h } from "./dom.js";

const MAX_CHARS = 50_000;

const words = (text) => new Set(text.split(" "));
const C_LIKE = words(
  "abstract as async await auto bool boolean break case catch char class const constexpr continue default delete do double else enum export extends extern false final finally float fn for from func function go goto if impl implements import in inline instanceof int interface let long loop match mod mut namespace new nil null nullptr operator override package private protected pub public return self short signed sizeof static string struct super switch template this throw throws trait true try type typedef typename typeof undefined union unsafe unsigned use using var virtual void volatile where while with yield",
);
const SCRIPT = words(
  "and as assert async await begin break case class continue def del do done elif else elsif end ensure esac except exec export False false fi finally for from function global if import in is lambda local module next nil None nonlocal not or pass raise require rescue return self set source then True true try unless until while with yield",
);
const SQL = words(
  "add all alter and as asc between by case check column constraint create cross database default delete desc distinct drop else end exists foreign from full group having in index inner insert into is join key left like limit not null on or order outer primary references right select set table then union unique update values view when where with",
);

const FAMILIES = [
  [words("py python python3 sh bash zsh shell console rb ruby perl pl r yaml yml toml ini dockerfile makefile make julia jl elixir nim cmake"), { line: "#", keywords: SCRIPT }],
  [words("sql postgresql mysql sqlite plsql"), { line: "--", keywords: SQL, anyCase: true }],
  [words("lua haskell hs elm ada"), { line: "--", keywords: SCRIPT }],
  [words("c h cpp c++ cc hpp cuda cu java js javascript mjs jsx ts typescript tsx go rust rs swift kotlin kt scala cs csharp c# php dart zig css scss less json json5 jsonc proto glsl wgsl"), { line: "//", keywords: C_LIKE }],
];

const TOKEN = {
  "#": /(#.*)|("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(\b\d[\w.]*)|([A-Za-z_]\w*)/g,
  "--": /(--.*)|("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(\b\d[\w.]*)|([A-Za-z_]\w*)/g,
  "//": /(\/\/.*|\/\*[^]*?(?:\*\/|$))|("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|`(?:[^`\\]|\\.)*`)|(\b\d[\w.]*)|([A-Za-z_$]\w*)/g,
};

/** Appends `text` to `parent`, coloured where the language is known. */
export function highlight(text, language, parent) {
  const family = FAMILIES.find(([names]) => names.has(language.toLowerCase()))?.[1];
  if (!family || text.length > MAX_CHARS) {
    parent.append(text);
    return;
  }
  let done = 0;
  for (const found of text.matchAll(TOKEN[family.line])) {
    const [whole, comment, string, number] = found;
    const isKeyword = family.keywords.has(family.anyCase ? whole.toLowerCase() : whole);
    const kind = comment ? "comment" : string ? "string" : number ? "number" : isKeyword ? "keyword" : null;
    if (!kind) continue;
    parent.append(text.slice(done, found.index), h("span", { class: `code-${kind}` }, whole));
    done = found.index + whole.length;
  }
  parent.append(text.slice(done));
}
