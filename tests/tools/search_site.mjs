// Search a built site as a browser does, with the worker of the theme: node search_site.mjs SITE QUERY...
import fs from "node:fs"

const [site, ...queries] = process.argv.slice(2)
const folder = `${site}/assets/javascripts/workers/`
const worker = fs.readFileSync(folder + fs.readdirSync(folder).find(name => name.endsWith(".js")), "utf8")
const [SETUP, QUERY] = [0, 2] // types of the worker's messages
const listeners = []
let answered

globalThis.self = globalThis
globalThis.addEventListener = (_, listener) => listeners.push(listener)
globalThis.postMessage = message => answered(message)
;(0, eval)(worker)

function send(message) {
  return new Promise(resolve => {
    answered = resolve
    listeners.forEach(listener => listener({ data: message }))
  })
}

const index = JSON.parse(fs.readFileSync(`${site}/search/search_index.json`))
await send({ type: SETUP, data: { ...index, options: { suggest: false } } })
const found = {}
for (const query of queries) {
  const { data } = await send({ type: QUERY, data: query })
  found[query] = data.items.map(page => page[0].location)
}
console.log(JSON.stringify(found))
