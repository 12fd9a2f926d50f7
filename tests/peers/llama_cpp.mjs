// Probabilities of the next token after each prefix of a sequence, by llama.cpp as node-llama-cpp ships it.
//
//   node llama_cpp.mjs MODEL.gguf TOKENS [ADAPTER.gguf]     TOKENS: a JSON list of ids; prints a JSON list of [id, probability]
//                                                           lists
import {getLlama} from "node-llama-cpp";

const [path, tokens, adapter] = process.argv.slice(2);
const llama = await getLlama({build: "never", gpu: false, logLevel: "error"});
const model = await llama.loadModel({modelPath: path, gpuLayers: 0});
const lora = adapter ? {adapters: [{filePath: adapter}]} : undefined;
const context = await model.createContext({contextSize: 128, lora});
const options = {generateNext: {probabilities: true, options: {temperature: 1, topK: 0, topP: 1, minP: 0}}};
const input = JSON.parse(tokens).map((id) => [id, options]);
const out = await context.getSequence().controlledEvaluate(input);
process.stdout.write(JSON.stringify(out.map((o) => [...o.next.probabilities])) + "\n", () => process.exit(0));
