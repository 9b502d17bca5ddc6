// Where conversations are kept: in this browser.

const NAME = "dragoman";
const CHATS = "chats";

function opened() {
  return new Promise((resolve, reject) => {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(CHATS, { keyPath: "id" }).createIndex("updated", "updated");
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

/** Kept in this browser; where it forbids that, for as long as the page is open. */
export class BrowserHistory {
  #database = null;
  #here = new Map();

  async #store(mode) {
    this.#database ??= opened().catch(() => null);
    const database = await this.#database;
    return database?.transaction(CHATS, mode).objectStore(CHATS) ?? null;
  }

  /** Titles and times of all, the newest first. */
  async list() {
    const store = await this.#store("readonly");
    if (!store) return [...this.#here.values()].map(summary).sort(newestFirst);
    const found = [];
    await new Promise((resolve, reject) => {
      const walk = store.index("updated").openCursor(null, "prev");
      walk.onerror = () => reject(walk.error);
      walk.onsuccess = () => {
        if (!walk.result) return resolve();
        found.push(summary(walk.result.value));
        walk.result.continue();
      };
    });
    return found;
  }

  async load(id) {
    const store = await this.#store("readonly");
    return (store ? await done(store.get(id)) : this.#here.get(id)) ?? null;
  }

  async save(tree) {
    const plain = JSON.parse(JSON.stringify(tree));
    const store = await this.#store("readwrite");
    if (store) await done(store.put(plain));
    else this.#here.set(plain.id, plain);
  }

  async remove(id) {
    const store = await this.#store("readwrite");
    if (store) await done(store.delete(id));
    else this.#here.delete(id);
  }
}

function summary({ id, title, updated }) {
  return { id, title, updated };
}

function newestFirst(one, other) {
  return other.updated - one.updated;
}
