// A browser starts no Worker from a file:// page, and the search runs in one. Here its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(script) {
      super();
      this.frame = document.body.appendChild(document.createElement("iframe"));
      this.frame.hidden = true;
      const inner = this.frame.contentWindow;
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.importScripts = async (...scripts) => {
        for (const one of scripts) {
          await this.load(one);
        }
      };
      this.ready = this.load(script);
    }

    // Resolves once the frame has run a script.
    load(script) {
      const element = this.frame.contentDocument.createElement("script");
      element.src = script;
      return new Promise((resolve, reject) => {
        element.onload = resolve;
        element.onerror = reject;
        this.frame.contentDocument.body.append(element);
      });
    }

    async postMessage(data) {
      await this.ready;
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
  window.Worker = window.IFrameWorker;
}
