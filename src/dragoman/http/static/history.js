// Storage of chats in this browser.

const NAME = "dragoman";
const CHATS = "chats";
const TITLES = "titles";

function opened() {
  return new Promise((resolve, reject) => {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => {
      asked.result.createObjectStore(CHATS, { keyPath: "id" });
      // The list of chats is drawn often, and chats are long: their titles are stored separately.
      asked.result.createObjectStore(TITLES, { keyPath: "id" });
    };
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

function done(asked) {
  return new Promise((resolve, reject) => {
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

/** Chats stored in this browser; in memory, if the browser forbids storage. */
export class BrowserHistory {
  #database = null;
  #here = new Map();

  /** Returns {chats, titles}, or null. */
  async #stores(mode) {
    this.#database ??= opened().catch(() => null);
    const taken = (await this.#database)?.transaction([CHATS, TITLES], mode);
    return taken ? { chats: taken.objectStore(CHATS), titles: taken.objectStore(TITLES) } : null;
  }

  /** Returns the titles and times of all chats, newest first. */
  async list() {
    const stores = await this.#stores("readonly");
    const found = stores ? await done(stores.titles.getAll()) : [...this.#here.values()].map(summary);
    return found.sort(newestFirst);
  }

  async load(id) {
    const stores = await this.#stores("readonly");
    return (stores ? await done(stores.chats.get(id)) : this.#here.get(id)) ?? null;
  }

  async save(tree) {
    const plain = JSON.parse(JSON.stringify(tree));
    const stores = await this.#stores("readwrite");
    if (!stores) this.#here.set(plain.id, plain);
    else await Promise.all([done(stores.chats.put(plain)), done(stores.titles.put(summary(plain)))]);
  }

  async remove(id) {
    const stores = await this.#stores("readwrite");
    if (!stores) this.#here.delete(id);
    else await Promise.all([done(stores.chats.delete(id)), done(stores.titles.delete(id))]);
  }
}

function summary({ id, title, updated }) {
  return { id, title, updated };
}

function newestFirst(one, other) {
  return other.updated - one.updated;
}
