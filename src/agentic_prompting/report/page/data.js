// The data of the page: blocks of packed JSON, and addresses that name one item of them.

/** Unpacks the data of a block; null if the page has no such block. */
async function unpack(name) {
  const block = byId(`data-${name}`);
  if (!block) return null;
  const bytes = Uint8Array.from(atob(block.textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

/** A list in chunks of `size` items, each of which is unpacked when it is first needed. */
class ChunkedList {
  constructor(name, size) {
    this.name = name;
    this.size = size;
    this.chunks = new Map(); // promises of items, by the chunk's number
  }

  loadChunk(number) {
    if (!this.chunks.has(number)) {
      this.chunks.set(number, unpack(`${this.name}-${number}`));
    }
    return this.chunks.get(number);
  }

  async loadItem(index) {
    const items = await this.loadChunk(Math.floor(index / this.size));
    return items[index % this.size];
  }
}

/** Smallest and largest of some numbers, of which there may be very many. */
function findRange(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return [low, high];
}

// The function that opens an item by its number, by the word in the item's address: for
// `#rollout-17` it is that of "rollout".
const ITEM_OPENERS = new Map();

/** Opens the item that the page's address names, if it names one. */
function openAddressedItem() {
  const match = /^#(\w+)-(\d+)$/.exec(location.hash);
  if (!match) return undefined;
  const [, word, number] = match;
  return ITEM_OPENERS.get(word)?.(Number(number));
}
