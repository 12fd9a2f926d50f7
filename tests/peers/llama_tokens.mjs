// Tokens of texts, by llama.cpp as node-llama-cpp ships it.
//
//   node llama_tokens.mjs MODEL.gguf TEXTS     TEXTS: a JSON list; prints a JSON list of lists of ids
import {getLlama} from "node-llama-cpp";

const [path, texts] = process.argv.slice(2);
const llama = await getLlama({build: "never", gpu: false, logLevel: "error"});
const model = await llama.loadModel({modelPath: path, gpuLayers: 0});
const out = JSON.parse(texts).map((text) => [...model.tokenize(text, true)]);
process.stdout.write(JSON.stringify(out) + "\n", () => process.exit(0));
